"""The compressors on trial: adding a codec is one line here."""

from __future__ import annotations

from cgx.compressors.registry import compressor_for
from cgx.core.spec import Cast, Identity, Uniform
from tests.laws.families import IN_BF16, IN_OWN_DTYPE, UNIFORM, WHOLE_ROWS, Family, Subject
from tests.laws.varlen import ZeroSuppressed
from tests.strategies import BLOCK_SIZES, ROUNDINGS, SCALES

# All bits with all roundings; block sizes and scale dtypes take turns so that each meets every other value.
_UNIFORM = [
    Uniform(bits, BLOCK_SIZES[(bits + i + 1) % 3], rounding, SCALES[(bits + i) // 2 % 2])
    for bits in range(1, 9)
    for i, rounding in enumerate(ROUNDINGS)
]

_FAMILIES: list[tuple[object, Family]] = [
    *((spec, UNIFORM) for spec in _UNIFORM),
    (Identity(), IN_OWN_DTYPE),
    (Cast(), IN_BF16),
    (ZeroSuppressed(), WHOLE_ROWS),
]

SUBJECTS = [Subject(spec, family, compressor_for(spec)) for spec, family in _FAMILIES]
