"""What a reduction must give, computed stripe by stripe in one thread, with no layout, no pieces and no buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cgx.collectives.base import Op
from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, payload_keys, stream
from cgx.core.segments import CARRIERS, Segment
from cgx.core.spec import Cast, Dtype, Uniform
from cgx.kernels.reference import from_f32, to_f32, uniform_decode, uniform_encode
from tests.harness import Array, Values
from tests.strategies import Floats

BF16 = CARRIERS["bf16"]


def reduce_by_oracle(
    inputs: Sequence[Values], segments: Sequence[Segment], op: Op = Op.SUM, *, seed: int = 0,
    reduction_index: int = 0,
) -> dict[str, Array]:  # fmt: skip
    """Return the reduced segments by name: what every rank must hold."""
    return {
        segment.name: np.concatenate(
            [CARRIERS[segment.dtype].type([])]
            + [
                _reduce_stripe(
                    [to_f32(values[segment.name][start : start + segment.stripe_numel]) for values in inputs],
                    segment, start, int(owner), op, _key(segment.name, seed, reduction_index),
                )
                for start, owner in zip(
                    range(0, segment.numel, segment.stripe_numel), segment.owners(len(inputs)), strict=True
                )
            ]
        )
        for segment in segments
    }  # fmt: skip


def _key(name: str, seed: int, reduction_index: int) -> Any:
    words = np.array([name_hash(name)], np.uint64), np.array([reduction_index], np.uint64)
    return parameter_keys(seed, *words)


def _reduce_stripe(parts: Sequence[Floats], segment: Segment, start: int, owner: int, op: Op, key: Any) -> Array:
    heard = [
        part if rank == owner
        else sent_by(part, segment.specs.scatter, segment.dtype, key, stream(SCATTER, rank), start)
        for rank, part in enumerate(parts)
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        total = heard[0]
        for part in heard[1:]:
            total = total + part
        total = total * np.float32(1 / len(parts) if op is Op.AVG else 1)
    total = sent_by(total, segment.specs.gather, segment.dtype, key, stream(GATHER, owner), start)
    return from_f32(total, CARRIERS[segment.dtype])


def sent_by(values: Floats, spec: Any, dtype: Dtype, key: Any, sender: int, start: int) -> Floats:
    """Return what `values` decode to at the receiver."""
    if isinstance(spec, Uniform):
        words = payload_keys(key, sender)[0]
        payload, _ = uniform_encode(values, spec, words, start)
        return uniform_decode(payload, len(values), spec, words, start)
    if isinstance(spec, Cast):
        return to_f32(from_f32(values, BF16))
    if type(spec).__name__ == "ZeroSuppressed":  # exact in fp32
        return values
    return to_f32(from_f32(values, CARRIERS[dtype]))
