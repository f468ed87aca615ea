"""How to compress, as frozen data with a text form that round-trips.

``uniform:4`` is short for ``uniform:4/block=128/rounding=dithered/scale=bf16``; ``+`` joins the specs of phase one
(scatter) and phase two (gather). Defaults come from ``benchmarks/rate_distortion.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, final, get_args

from cgx.errors import SpecError

Rounding = Literal["nearest", "stochastic", "dithered"]
ScaleDtype = Literal["fp32", "bf16"]
Dtype = Literal["fp32", "fp16", "bf16"]

ITEMSIZE: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 65536


@final
@dataclass(frozen=True, slots=True)
class Identity:
    """Sends the elements as they are, in their own dtype."""

    def __str__(self) -> str:
        return "identity"


@final
@dataclass(frozen=True, slots=True)
class Cast:
    """Sends the elements as bfloat16, rounded to nearest even (16 bits per element)."""

    dtype: Literal["bf16"] = "bf16"

    def __post_init__(self) -> None:
        _one_of("cast", "dtype", self.dtype, ("bf16",))

    def __str__(self) -> str:
        return f"cast:{self.dtype}"


@final
@dataclass(frozen=True, slots=True)
class Uniform:
    """Blocks of ``block_size`` elements on ``2**bits`` equally spaced levels between the block's minimum and maximum.

    Args:
        bits: Bits per code, 1 to 8. One more bit quarters the squared error.
        block_size: Elements that share one ``(low, step)``; a power of two from 32 to 65536. Smaller is more
            accurate and costs more: two scales per block.
        rounding: ``nearest`` (biased, least error), ``stochastic`` (unbiased, twice the error of dithered) or
            ``dithered`` (subtractive dither: unbiased, error as small as nearest; the receiver regenerates the dither).
        scale: Dtype of ``low`` and ``step``; ``bf16`` rounds them outward, so nothing is clipped.

    References:
        CGX (arXiv 2111.08617), section 3; QSGD (arXiv 1610.02132); subtractive dither: Roberts, 1962.
    """

    bits: int = 4
    block_size: int = 128
    rounding: Rounding = "dithered"
    scale: ScaleDtype = "bf16"

    def __post_init__(self) -> None:
        if not (type(self.bits) is int and 1 <= self.bits <= 8):  # True is no number of bits
            raise SpecError(f"uniform: bits must be an integer from 1 to 8, found {self.bits!r}")
        size = self.block_size
        if not (isinstance(size, int) and MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and size & (size - 1) == 0):
            raise SpecError(
                f"uniform: block must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, found {size!r}"
            )
        _one_of("uniform", "rounding", self.rounding, get_args(Rounding))
        _one_of("uniform", "scale", self.scale, get_args(ScaleDtype))

    def __str__(self) -> str:
        return f"uniform:{self.bits}/block={self.block_size}/rounding={self.rounding}/scale={self.scale}"


Spec = Identity | Cast | Uniform
GRAMMAR = "identity, bf16, uniform:BITS[/block=N][/rounding=nearest|stochastic|dithered][/scale=fp32|bf16], or A+B"


@final
@dataclass(frozen=True, slots=True)
class PhaseSpecs:
    """What a parameter uses in phase one (``scatter``) and phase two (``gather``)."""

    scatter: Spec
    gather: Spec

    def __str__(self) -> str:
        return str(self.scatter) if self.scatter == self.gather else f"{self.scatter}+{self.gather}"


EXACT = PhaseSpecs(Identity(), Identity())


def block_size_of(spec: object) -> int:
    """Elements whose bytes belong together: a block for ``Uniform``, one for codecs without blocks."""
    return int(getattr(spec, "block_size", 1))


def parse_spec(text: str) -> Spec:
    """Reads one spec.

    Raises:
        SpecError: The text is not of the grammar, or a value is out of range.

    Example:
        >>> parse_spec("uniform:4/rounding=nearest")
        Uniform(bits=4, block_size=128, rounding='nearest', scale='bf16')
        >>> parse_spec(str(Uniform(3))) == Uniform(3)
        True
    """
    head, *options = text.strip().split("/")
    name, _, argument = head.partition(":")
    if name == "identity" and not argument and not options:
        return Identity()
    if head in ("bf16", "cast:bf16") and not options:
        return Cast()
    if name == "uniform":
        return _parse_uniform(text, argument, options)
    raise SpecError(f"unknown spec {text!r}; valid forms: {GRAMMAR}")


@lru_cache(maxsize=1024)  # loops that reduce by hand ask every time
def parse_specs(text: str) -> PhaseSpecs:
    """Reads ``A`` (both phases) or ``A+B`` (phase one + phase two).

    Example:
        >>> str(parse_specs("uniform:4+bf16"))
        'uniform:4/block=128/rounding=dithered/scale=bf16+cast:bf16'
    """
    parts = text.split("+")
    if len(parts) > 2:
        raise SpecError(f"{text!r} joins {len(parts)} specs; there are two phases: {GRAMMAR}")
    return PhaseSpecs(parse_spec(parts[0]), parse_spec(parts[-1]))


def _parse_uniform(text: str, argument: str, options: list[str]) -> Uniform:
    named: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in ("block", "rounding", "scale") or key in named:
            raise SpecError(f"{text!r}: cannot use option {option!r}; valid forms: {GRAMMAR}")
        named[key] = value
    numbers = {"bits": argument} if argument else {}
    if "block" in named:
        numbers["block_size"] = named.pop("block")
    values: dict[str, object] = dict(named)
    for key, value in numbers.items():
        if not value.isdecimal():
            raise SpecError(f"{text!r}: {key} must be a whole number, found {value!r}")
        values[key] = int(value)
    known = {field.name for field in fields(Uniform)}
    assert values.keys() <= known
    return Uniform(**values)  # type: ignore[arg-type]


def _one_of(spec: str, field: str, found: object, valid: tuple[str, ...]) -> None:
    if found not in valid:
        raise SpecError(f"{spec}: {field} must be one of {', '.join(valid)}; found {found!r}")
