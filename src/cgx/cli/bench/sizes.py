"""Sizes of gradients as text: the one place that knows what ``100MB`` means."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from cgx.errors import SpecError

_FACTORS: Final = {"GB": 1_000_000_000, "MB": 1_000_000, "KB": 1_000, "B": 1}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmg]?b)", re.ASCII | re.IGNORECASE)
_MIN_NBYTES: Final = 4


def parse_size(text: str) -> int:
    """Reads a number of bytes.

    Args:
        text: A number and a unit without a space, in any case: ``B``, ``KB``, ``MB`` or ``GB``, powers of 1000.

    Raises:
        SpecError: The text is something else, or less than one fp32 element.

    Example:
        >>> parse_size("100MB"), parse_size("2.5kb")
        (100000000, 2500)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{text!r} is not a size: write a number with its unit, such as 1KB, 25MB or 1GB.")
    nbytes = int(Decimal(match[1]) * _FACTORS[match[2].upper()])
    if nbytes < _MIN_NBYTES:
        raise SpecError(f"{text!r} holds no element: write at least {_MIN_NBYTES}B.")
    return nbytes


def format_size(nbytes: int) -> str:
    """Writes a number of bytes for people.

    Example:
        >>> format_size(100_000_000), format_size(1_500)
        ('100MB', '1.5KB')
    """
    unit = next(unit for unit, factor in _FACTORS.items() if nbytes >= factor or factor == 1)
    return f"{nbytes / _FACTORS[unit]:.6g}{unit}"
