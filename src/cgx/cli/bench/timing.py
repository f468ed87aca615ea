"""Rounds in which everything that is compared takes its turn, so that a busy machine is as hard on all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np


@final
@dataclass(frozen=True)
class Percentiles:
    """Seconds under which 20, 50 and 80 of 100 rounds stayed."""

    p20: float
    p50: float
    p80: float


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Percentiles of a sample, interpolated.

    Example:
        >>> percentiles([1.0, 2.0, 4.0]).p50
        2.0
    """
    p20, p80 = np.percentile(seconds, [20, 80])
    return Percentiles(float(p20), statistics.median(seconds), float(p80))


def milliseconds(seconds: float) -> str:
    """Writes a time in milliseconds, with three digits.

    Example:
        >>> milliseconds(0.0012345), milliseconds(12.345)
        ('1.23', '12345')
    """
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"
