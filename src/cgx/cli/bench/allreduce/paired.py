"""How much longer one contender takes than another, round by round, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

_RESAMPLES = 2000
_SURE_PERCENT = 95.0


@final
@dataclass(frozen=True)
class Ratio:
    """A ratio of times: its median over the rounds, and a 95 % interval of it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def compare(seconds: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio ``seconds / others`` of times that belong together in pairs.

    A round's disturbance falls on both, so a pair's ratio is steadier than its times. The interval is a percentile
    bootstrap of the median, with a fixed seed: the same measurements always give the same interval.

    Args:
        seconds: Of one contender, an entry a round.
        others: Of the other, in the same rounds.

    Example:
        >>> print(compare([2.0, 2.2, 1.8], [1.0, 1.0, 1.0]))
        2.000 (1.800 to 2.200)
    """
    ratios = np.asarray(seconds) / np.asarray(others)
    drawn = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    rest = (100 - _SURE_PERCENT) / 2
    low, high = np.percentile(medians, [rest, 100 - rest])
    return Ratio(float(np.median(ratios)), float(low), float(high))
