"""Lists of segments with their inputs, as the conformance suite reduces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from cgx.collectives.nodes import Nodes
from cgx.compressors.registry import compressor_for
from cgx.core.algorithm import Algorithm, Cost, cost
from cgx.core.segments import Segment
from cgx.core.spec import EXACT, Dtype, Identity, PhaseSpecs, Spec, Uniform, parse_specs
from cgx.core.wire import HEAD_NBYTES, Head
from cgx.transports.base import Bytes
from tests.conformance.ranks import Array, Settings, Values
from tests.laws.varlen import ZeroSuppressed
from tests.strategies import gradient, in_dtype

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@final
@dataclass(frozen=True)
class Method:
    """An algorithm and the ranks that use it."""

    algorithm: Algorithm
    world_size: int
    nodes: Nodes | None = None
    intra: Spec = Settings.intra

    def settings(self, *args: Any, **options: Any) -> Settings:
        """Return settings with this algorithm."""
        return Settings(*args, algorithm=self.algorithm, nodes=self.nodes, intra=self.intra, **options)


def hosts(count: int, ranks_per_node: int, *, are_interleaved: bool = False) -> Nodes:
    """Return nodes whose ranks follow one another, or take turns."""
    ranks = range(count * ranks_per_node)
    return Nodes.of([rank % count if are_interleaved else rank // ranks_per_node for rank in ranks])


def _hierarchical(count: int, ranks_per_node: int, *, are_interleaved: bool = False) -> Method:
    nodes = hosts(count, ranks_per_node, are_interleaved=are_interleaved)
    return Method("hierarchical", count * ranks_per_node, nodes)


_FLAT: tuple[Algorithm, ...] = ("scatter_reduce", "all_gather", "ring")
_SHAPES = ((2, 2), (2, 4), (4, 2), (3, 2))
METHODS: dict[str, Method] = {
    **{f"{algorithm}-{world}": Method(algorithm, world) for algorithm in _FLAT for world in WORLD_SIZES},
    **{f"hierarchical-{n}x{r}": _hierarchical(n, r) for n, r in _SHAPES},
    **{f"hierarchical-{n}x{r}-interleaved": _hierarchical(n, r, are_interleaved=True) for n, r in _SHAPES},
    "hierarchical-2x3-lossy": replace(_hierarchical(2, 3), intra=Uniform(6)),
}


def methods_of(world_size: int) -> list[str]:
    """Return the names of all methods for as many ranks."""
    return [name for name, method in METHODS.items() if method.world_size == world_size]


# Around nothing, a tile, the smallest compressed tensor and a stripe, and multiples of a stripe.
SIZES = (0, 1, 33, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 3 * 4096 + 5)
SUPPRESSED = PhaseSpecs(ZeroSuppressed(), ZeroSuppressed())  # type: ignore[arg-type]


def segment(name: str, numel: int, specs: PhaseSpecs | str, dtype: Dtype = "fp32") -> Segment:
    """Return a flat segment."""
    return Segment(name, (numel,), dtype, parse_specs(specs) if isinstance(specs, str) else specs)


def of_sizes(specs: PhaseSpecs | str, dtype: Dtype = "fp32", sizes: Sequence[int] = SIZES) -> list[Segment]:
    """Return one segment of each size."""
    return [segment(f"layer.{i}.weight", numel, specs, dtype) for i, numel in enumerate(sizes)]


def mixed(dtype: Dtype = "fp32", *, with_varying: bool = False) -> list[Segment]:
    """Return a model whose neighbours have different specs, vectors between them and one layer of many stripes."""
    specs: list[PhaseSpecs | str] = [
        "uniform:4", EXACT, "uniform:2/rounding=stochastic/scale=fp32+uniform:8/rounding=nearest", EXACT,
        "uniform:3/block=1024+bf16", "bf16", "uniform:4/block=8192", "bf16+uniform:5/block=32", "uniform:4",
    ]  # fmt: skip
    sizes = [4097, 64, 1025, 3, 5000, 777, 20000, 4096, 9 * 4096 + 100]
    segments = [segment(f"{i}.weight", n, s, dtype) for i, (n, s) in enumerate(zip(sizes, specs, strict=True))]
    if with_varying:
        segments[3:3] = [segment("varying.a", 4100, SUPPRESSED, dtype), segment("varying.b", 10, SUPPRESSED, dtype)]
    return segments


def inputs_of(
    segments: Sequence[Segment], world_size: int, *, pattern: str = "normal", seed: object = 0
) -> list[dict[str, Array]]:
    """Return gradients of every segment for every rank."""
    return [
        {s.name: in_dtype(gradient(pattern, s.numel, seed=(seed, rank, s.name)), s.dtype) for s in segments}
        for rank in range(world_size)
    ]


def same_bytes(a: Values, b: Values) -> bool:
    """Compare without mistaking -0.0 for 0.0 or NaN for anything but itself."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a
    )


def cost_of(segments: Sequence[Segment], world_size: int, rank: int) -> tuple[int, int]:
    """Return (phase one, phase two) payload bytes that `rank` sends in one piece, from owners and sizes alone."""
    scatter, gather, owners = 0, 0, set()
    for s in segments:
        one, two = compressor_for(s.specs.scatter), compressor_for(s.specs.gather)
        for start, owner in zip(range(0, s.numel, s.stripe_numel), s.owners(world_size), strict=True):
            numel = min(s.stripe_numel, s.numel - start)
            owners.add(int(owner))
            if owner == rank:
                gather += two.row_nbytes(numel, s.dtype)
            else:
                scatter += one.row_nbytes(numel, s.dtype)
    scatter += HEAD_NBYTES * len(owners - {rank})
    gather = (world_size - 1) * (gather + HEAD_NBYTES if rank in owners else 0)
    return scatter, gather


def full_copy_nbytes(segments: Sequence[Segment], spec_of: Callable[[PhaseSpecs], Spec]) -> int:
    """Return payload bytes of one copy under a phase's specs, heads aside."""
    return sum(
        compressor_for(spec_of(s.specs)).row_nbytes(min(s.stripe_numel, s.numel - start), s.dtype)
        for s in segments
        for start in range(0, s.numel, s.stripe_numel)
    )


def price_of(method: Method, segments: Sequence[Segment]) -> Cost:
    """Return what `core.algorithm` says that a method costs."""
    return cost(
        method.algorithm,
        full_copy_nbytes(segments, lambda specs: specs.scatter),
        world_size=method.world_size,
        ranks_per_node=1 if method.nodes is None else method.nodes.ranks_per_node,
        gather_copy_nbytes=full_copy_nbytes(segments, lambda specs: specs.gather),
        intra_copy_nbytes=full_copy_nbytes(segments, lambda s: Identity() if s == EXACT else method.intra),
    )


def split_payloads(message: Bytes) -> list[Bytes]:
    """Return the payloads that a message consists of, without their heads."""
    payloads = []
    while message.size:
        used = Head.used_nbytes_of(message)
        payloads.append(message[HEAD_NBYTES:used])
        message = message[used:]
    return payloads
