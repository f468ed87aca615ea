"""What a reduction must give, computed stripe by stripe in one thread, with no layout, no pieces and no buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cgx.collectives.base import Op
from cgx.collectives.layout import LOCAL
from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, payload_keys, stream
from cgx.core.segments import CARRIERS, Segment
from cgx.core.spec import EXACT, Cast, Dtype, Identity, Uniform
from cgx.kernels.reference import from_f32, to_f32, uniform_decode, uniform_encode
from tests.conformance.ranks import Array, Settings, Values
from tests.strategies import Floats

BF16 = CARRIERS["bf16"]


def reduce_by_oracle(
    inputs: Sequence[Values], segments: Sequence[Segment], asked: Settings | None = None
) -> dict[str, Array]:
    """Return the reduced segments by name: what every rank must hold."""
    asked = asked or Settings()
    return {
        segment.name: np.concatenate(
            [CARRIERS[segment.dtype].type([])]
            + [
                _reduce_stripe(
                    [to_f32(values[segment.name][start : start + segment.stripe_numel]) for values in inputs],
                    segment, start, int(owner), asked,
                )
                for start, owner in zip(
                    range(0, segment.numel, segment.stripe_numel), segment.owners(len(inputs)), strict=True
                )
            ]
        )
        for segment in segments
    }  # fmt: skip


def _key(name: str, asked: Settings) -> Any:
    words = np.array([name_hash(name)], np.uint64), np.array([asked.reduction_index], np.uint64)
    return parameter_keys(asked.seed, *words)


@np.errstate(all="ignore")
def _reduce_stripe(parts: Sequence[Floats], segment: Segment, start: int, owner: int, asked: Settings) -> Array:
    key, specs, world = _key(segment.name, asked), segment.specs, len(parts)

    def sent(values: Floats, rank: int, phase: int = SCATTER, spec: Any = specs.scatter) -> Floats:
        return sent_by(values, spec, segment.dtype, key, stream(phase, rank), start)

    def scaled(total: Floats, ranks: int) -> Floats:
        return total * np.float32(1 / ranks if asked.op is Op.AVG else 1)

    match asked.algorithm:
        case "scatter_reduce":
            total = scaled(_sum(part if rank == owner else sent(part, rank) for rank, part in enumerate(parts)), world)
        case "all_gather":
            total = scaled(_sum(sent(part, rank) for rank, part in enumerate(parts)), world)
        case "ring":
            is_wide = segment.dtype == "fp32"
            own = parts if is_wide else [scaled(part, world) for part in parts]
            total = own[(owner + 1) % world]
            for before in range(owner + 1, owner + world):
                total = sent(total, before % world) + own[(before + 1) % world]
            total = scaled(total, world) if is_wide else total
        case "hierarchical":
            assert asked.nodes is not None
            intra = Identity() if specs == EXACT else asked.intra
            nodes = {
                peer: scaled(
                    _sum(
                        parts[mate] if mate == peer else sent(parts[mate], mate, LOCAL, intra)
                        for mate in asked.nodes.local_peers(peer)
                    ),
                    asked.nodes.ranks_per_node,
                )
                for peer in asked.nodes.column_peers(owner)
            }
            total = scaled(
                _sum(part if peer == owner else sent(part, peer) for peer, part in nodes.items()), len(nodes)
            )
    if asked.algorithm != "all_gather":
        total = sent(total, owner, GATHER, specs.gather)
    return from_f32(total, CARRIERS[segment.dtype])


def _sum(parts: Iterable[Floats]) -> Floats:
    first, *others = parts
    for part in others:
        first = first + part
    return first


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
