"""Link rates as text: the one place that knows what ``100mbit`` means."""

import re
from decimal import Decimal
from typing import Final

from cgx.errors import SpecError

_FACTORS: Final = {
    "gbit": 1_000_000_000,
    "mbit": 1_000_000,
    "kbit": 1_000,
    "bit": 1,
}
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmg]?bit)", re.ASCII | re.IGNORECASE)


def parse_rate(text: str) -> float | None:
    """Reads a link rate.

    Args:
        text: A number and a unit without a space, in any case: ``bit``, ``kbit``, ``mbit`` or
            ``gbit`` per second, powers of 1000; or ``none`` for a link without a limit.

    Returns:
        Bits per second, or None for ``none``.

    Raises:
        SpecError: The text is neither, is a bare number, or is zero.

    Example:
        >>> parse_rate("100mbit"), parse_rate("2.5Gbit"), parse_rate("none")
        (100000000.0, 2500000000.0, None)
    """
    stripped = text.strip()
    if stripped.lower() == "none":
        return None
    match = _RATE.fullmatch(stripped)
    if match is None:
        raise SpecError(
            f"{text!r} is not a link rate: write a number with its unit, such as 50kbit, 100mbit, "
            "2.5gbit, or none for no limit. A bare number could mean bits or bytes, and tools "
            "disagree about 'bps', so cgx takes neither."
        )
    bit_s = float(Decimal(match[1]) * _FACTORS[match[2].lower()])
    if bit_s == 0:
        raise SpecError(f"{text!r} is a link that moves nothing: write a rate above zero, or none.")
    return bit_s


def format_rate(bit_s: float | None) -> str:
    """Writes a link rate so that `parse_rate` reads the same rate back.

    Args:
        bit_s: Bits per second, or None for no limit.

    Example:
        >>> format_rate(1e8), format_rate(2.5e9), format_rate(None)
        ('100mbit', '2.5gbit', 'none')
    """
    if bit_s is None:
        return "none"
    unit = next((unit for unit, factor in _FACTORS.items() if bit_s >= factor), "bit")
    return f"{(Decimal(repr(float(bit_s))) / _FACTORS[unit]).normalize():f}{unit}"
