"""What the golden file pins: inputs made from formulas, so that no library's generator can move them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from cgx.core.random import SCATTER, name_hash, parameter_keys, stream
from cgx.core.spec import Cast, Dtype, Identity, Spec, Uniform
from tests.strategies import BLOCK_SIZES, ROUNDINGS, SCALES, Floats

NAME, SEED, REDUCTION, SENDER = "layer.weight", 1, 2, 3
STREAM = stream(SCATTER, SENDER)


def keys(name: str = NAME) -> NDArray[np.uint64]:
    """The key of the one parameter, shape (1,)."""
    return parameter_keys(SEED, np.array([name_hash(name)], np.uint64), np.array([REDUCTION], np.uint64))


def formula(numel: int, *, salt: int = 0) -> Floats:
    """Multiples of 2**-12 in [-8, 8) without a pattern, on five scales that take turns every 32 elements."""
    i = np.arange(numel, dtype=np.int64)
    whole = (i * 40503 + i * i * 7919 + salt * 12345) % 65536 - 32768
    return np.ldexp(whole.astype(np.float64), -12 - i // 32 % 5).astype(np.float32)


def special() -> Floats:
    """Blocks of 32 that are constant, poisoned, subnormal or too wide, and a tail of 5."""
    x = formula(9 * 32 + 5)
    blocks = x[: 9 * 32].reshape(9, 32)
    bits = blocks.view(np.uint32)
    bits[0] = 0
    bits[1] = 0x3FC00000  # 1.5
    bits[2] = 0xBF8CCCCD  # -1.1, which bf16 cannot represent
    bits[3, 7] = 0xFFC12345  # a NaN with sign and payload
    bits[4, 31] = 0x7F800000  # infinity
    bits[5] = np.arange(32)  # multiples of 2**-149
    blocks[6, :2] = 3e38, -3e38
    bits[7, ::2], bits[7, 1::2] = 0x80000000, 0  # zeros of both signs
    bits[8, 0] = 0x7F7FFFFF  # the largest fp32
    return x


INPUTS = {"formula": formula, "special": lambda numel: special()[:numel]}


@final
@dataclass(frozen=True)
class Case:
    """One row, compressed alone."""

    spec: Spec
    numel: int
    dtype: Dtype = "fp32"
    input: str = "formula"
    start: int = 0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Text that identifies the case in the file."""
        return f"{self.spec} {self.dtype} {self.input}[{self.numel}] start={self.start} scale={self.scale}"


CASES = [
    *(
        Case(
            Uniform(bits, BLOCK_SIZES[(bits + i) % 3], rounding, SCALES[bits // 2 % 2]),
            161,
            start=4096 * bits,
        )
        for bits in range(1, 9)
        for i, rounding in enumerate(ROUNDINGS)
    ),
    *(Case(Uniform(3, 32), numel) for numel in (0, 1, 31, 32, 33)),
    *(Case(Uniform(4, 32, "dithered", scale), 293, input="special") for scale in SCALES),
    *(Case(Uniform(5, 32, "nearest", scale), 293, input="special") for scale in SCALES),
    Case(Uniform(4), 161, scale=0.3),
    Case(Uniform(4), 65, start=2**33 - 32),
    *(Case(Uniform(4), 161, dtype) for dtype in ("fp16", "bf16")),
    *(Case(spec, 37, dtype) for spec in (Identity(), Cast()) for dtype in ("fp32", "fp16", "bf16")),
]


@final
@dataclass(frozen=True)
class ReduceCase:
    """Three ranks' rows, reduced by rank 1."""

    scatter: Uniform
    gather: Uniform
    numel: int
    scale: float
    world_size: int = 3
    own_rank: int = 1

    @property
    def name(self) -> str:
        """Text that identifies the case in the file."""
        return f"reduce {self.scatter}+{self.gather} formula[{self.numel}] scale={self.scale}"


REDUCE_CASES = [
    ReduceCase(Uniform(4), Uniform(4), 161, 1.0),
    ReduceCase(Uniform(3, 32, "stochastic", "fp32"), Uniform(6, 1024, "nearest"), 161, 1 / 3),
]
