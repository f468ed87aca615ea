"""The laws of a reducer, ranks as threads: replicas, sums, exactness, bytes and owners."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx.collectives.base import Op
from cgx.collectives.layout import cut
from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.core.segments import CARRIERS, Segment
from cgx.core.spec import EXACT, Cast, Dtype, Identity, PhaseSpecs, parse_specs
from cgx.kernels.reference import to_f32
from cgx.transports.base import Channel
from tests.conformance.models import (
    METHODS,
    SIZES,
    SUPPRESSED,
    WORLD_SIZES,
    Method,
    cost_of,
    hosts,
    inputs_of,
    methods_of,
    mixed,
    of_sizes,
    price_of,
    same_bytes,
    segment,
    split_payloads,
)
from tests.conformance.oracle import reduce_by_oracle
from tests.conformance.ranks import RankResult, Settings, Values, reduce_on_threads
from tests.strategies import DTYPES, in_dtype, uniform_specs

CASES = {
    "sizes": lambda: of_sizes("uniform:4"),
    "sizes-stochastic": lambda: of_sizes("uniform:2/rounding=stochastic"),
    "sizes-exact": lambda: of_sizes(EXACT),
    "sizes-varying": lambda: of_sizes(SUPPRESSED),
    "mixed-fp32": lambda: mixed("fp32"),
    "mixed-fp16": lambda: mixed("fp16"),
    "mixed-bf16": lambda: mixed("bf16"),
    "mixed-varying": lambda: mixed(with_varying=True),
}


def agreed(results: list[RankResult]) -> Values:
    """Return what all ranks hold, after checking that they do."""
    for result in results:
        assert result.error is None, result.error
        assert same_bytes(results[0].values, result.values), "replicas differ"
    return results[0].values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_with_what_the_oracle_computes(case: str, method: str) -> None:
    segments = CASES[case]()
    inputs, asked = (
        inputs_of(segments, METHODS[method].world_size),
        METHODS[method].settings(Op.AVG, piece_nbytes=20_000),
    )
    result = agreed(reduce_on_threads(inputs, segments, asked))
    assert same_bytes(result, reduce_by_oracle(inputs, segments, asked))


@st.composite
def models(draw: st.DrawFn) -> list[Segment]:
    """Draw a model of one dtype; neighbours share a spec or not, a segment may have an owner of its own."""
    dtype = draw(st.sampled_from(DTYPES))
    codecs = st.one_of(uniform_specs, st.sampled_from([Identity(), Cast()]))
    choices = draw(st.lists(st.builds(PhaseSpecs, codecs, codecs), min_size=1, max_size=3))
    sizes = draw(st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 9000)), min_size=1, max_size=6))
    return [segment(f"p{i}", n, draw(st.sampled_from(choices)), dtype) for i, n in enumerate(sizes)]


@settings(max_examples=40)
@given(
    segments=models(), op=st.sampled_from(Op),
    method=st.sampled_from([name for name, method in METHODS.items() if method.world_size < 8]),
    piece_nbytes=st.integers(1, 40_000),
    pattern=st.sampled_from(["normal", "magnitudes", "sparse", "huge", "signed_zeros"]),
    seed=st.integers(0, 2**64 - 1), reduction_index=st.integers(0, 2**40),
)  # fmt: skip
def test_any_model_ends_with_what_the_oracle_computes(
    segments: list[Segment], method: str, op: Op, piece_nbytes: int, pattern: str, seed: int, reduction_index: int
) -> None:
    inputs = inputs_of(segments, METHODS[method].world_size, pattern=pattern)
    asked = METHODS[method].settings(op, piece_nbytes=piece_nbytes, seed=seed, reduction_index=reduction_index)
    result = agreed(reduce_on_threads(inputs, segments, asked))
    assert same_bytes(result, reduce_by_oracle(inputs, segments, asked))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_reduced_exactly_once(method: str, dtype: Dtype) -> None:
    segments, world_size = of_sizes(EXACT, dtype), METHODS[method].world_size
    # Whole numbers whose sums are exact in every dtype (bfloat16 has 8 bits): a lost or doubled one would show.
    inputs = [
        {s.name: in_dtype(((np.arange(s.numel) * (rank + 3)) % 16).astype(np.float32), dtype) for s in segments}
        for rank in range(world_size)
    ]
    result = agreed(reduce_on_threads(inputs, segments, METHODS[method].settings(piece_nbytes=7000)))
    for s in segments:
        expected = sum((np.arange(s.numel) * (rank + 3)) % 16 for rank in range(world_size))
        assert (to_f32(result[s.name]) == expected).all(), s


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "specs", ["uniform:4/rounding=nearest", "uniform:4/rounding=stochastic", "uniform:4/rounding=nearest/scale=fp32"]
)
def test_inputs_on_the_grid_give_the_exact_sum(specs: str, method: str) -> None:
    segments = of_sizes(specs, sizes=[128, 4096, 9 * 4096, 12_800])
    world_size = METHODS[method].world_size
    # Every block spans the 16 levels; rank r's step is a power of two, and so is the step of the sum and, where partial
    # sums are encoded, of each of those: there one rank alone has something to add.
    steps = [1, *(2**k for k in range(world_size - 1))]
    if METHODS[method].algorithm in ("ring", "hierarchical"):
        steps = [8 * (rank == world_size // 2) for rank in range(world_size)]
    grids = {s.name: np.resize(np.arange(16, dtype=np.float32)[::-1], s.numel) for s in segments}
    inputs = [{name: grid * np.float32(step) for name, grid in grids.items()} for step in steps]
    asked = replace(METHODS[method].settings(), intra=segments[0].specs.scatter)
    result = agreed(reduce_on_threads(inputs, segments, asked))
    for name, grid in grids.items():
        assert (result[name] == grid * sum(steps)).all(), name


@pytest.mark.parametrize("method", methods_of(4))
@pytest.mark.parametrize("specs", ["uniform:1", "uniform:4", "uniform:2/rounding=stochastic/scale=fp32", "bf16"])
def test_constant_blocks_give_the_exact_sum_and_the_exact_mean(specs: str, method: str) -> None:
    segments = of_sizes(specs)
    inputs = [{s.name: np.full(s.numel, rank + 1, np.float32) for s in segments} for rank in range(4)]
    total = agreed(reduce_on_threads(inputs, segments, METHODS[method].settings()))
    mean = agreed(reduce_on_threads(inputs, segments, METHODS[method].settings(Op.AVG)))
    assert all((total[s.name] == 10).all() and (mean[s.name] == 2.5).all() for s in segments)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_are_what_sizes_and_owners_say(case: str, world_size: int) -> None:
    segments = CASES[case]()
    inputs = inputs_of(segments, world_size)
    results = reduce_on_threads(inputs, segments, Settings(piece_nbytes=1 << 30))
    agreed(results)
    varying = "varying" in case
    for rank, result in enumerate(results):
        scatter, gather = cost_of(segments, world_size, rank)
        sent = [tap.nbytes[Channel.BODY] for tap in (result.scatter, result.gather)]
        if varying:  # the sizes are capacities then
            assert sent[0] <= scatter
            assert sent[1] <= gather
        else:
            assert sent == [scatter, gather]
        assert result.scatter.nbytes[Channel.TICKET] == 8 * (world_size - 1)
        for tap in (result.scatter, result.gather):
            assert tap.sent_nbytes == sum(tap.nbytes.values())
            assert tap.posts[Channel.BODY] == 1, "one step per phase and piece"
            assert tap.posts[Channel.SIZES] == (1 if varying else 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("case", "piece_nbytes"), [("sizes", 20_000), ("mixed-bf16", 1 << 30)])
def test_ranks_send_the_bytes_and_take_the_steps_of_the_cost(case: str, method: str, piece_nbytes: int) -> None:
    segments, by = CASES[case](), METHODS[method]
    asked = by.settings(piece_nbytes=piece_nbytes)
    results = reduce_on_threads(inputs_of(segments, by.world_size), segments, asked)
    agreed(results)
    price = price_of(by, segments)
    sent = sum(sum(payload_nbytes(result, peer) for peer in range(by.world_size)) for result in results)
    assert sent == round(by.world_size * price.nbytes)
    pieces = len(cut(segments, 1, piece_nbytes=piece_nbytes).pieces)
    for result in results:
        steps = result.scatter.posts[Channel.BODY] + result.gather.posts[Channel.BODY]
        assert steps == pieces * price.steps or by.world_size == 1
        assert result.scatter.nbytes[Channel.TICKET] == 8 * (by.world_size - 1)


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize(
    ("algorithm", "are_interleaved"),  # the cost of a ring is that of one that visits a node's ranks in turn
    [(a, interleaved) for a in ALGORITHMS for interleaved in (False, True) if not (a == "ring" and interleaved)],
)
def test_the_bytes_that_leave_a_node_are_those_of_the_cost(
    algorithm: Algorithm, are_interleaved: bool, shape: tuple[int, int]
) -> None:
    nodes = hosts(*shape, are_interleaved=are_interleaved)
    by = Method(algorithm, len(nodes.node_of), nodes)
    # The links of a ring carry equally much only when all ranks own equally much.
    segments = of_sizes("uniform:4", sizes=[by.world_size * 4096]) if algorithm == "ring" else mixed()
    results = reduce_on_threads(inputs_of(segments, by.world_size), segments, by.settings())
    agreed(results)
    sent = sum(
        payload_nbytes(result, peer)
        for rank, result in enumerate(results)
        for peer in range(by.world_size)
        if nodes.node_of[peer] != nodes.node_of[rank]
    )
    assert sent == round(nodes.count * price_of(by, segments).host_nbytes)


def payload_nbytes(result: RankResult, peer: int) -> int:
    """Return the bytes a rank sent to a peer, heads aside."""
    return sum(
        payload.nbytes
        for tap in (result.scatter, result.gather)
        for channel, to, message in tap.messages
        if channel is Channel.BODY and to == peer
        for payload in split_payloads(message)
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("op", Op)
def test_reduce_scatter_leaves_the_owner_the_sum_unencoded_and_the_others_their_input(world_size: int, op: Op) -> None:
    # The oracle with a second phase that loses nothing is what an owner must hold.
    segments = of_sizes("uniform:4+identity")
    inputs = inputs_of(segments, world_size)
    whole = reduce_on_threads(inputs, segments, Settings(op))
    results = reduce_on_threads(inputs, segments, Settings(op, scatter_only=True))
    expected = reduce_by_oracle(inputs, segments, Settings(op))
    for rank, result in enumerate(results):
        assert result.error is None
        for s in segments:
            is_mine = np.repeat(s.owners(world_size) == rank, s.stripe_numel)[: s.numel]
            held = np.where(is_mine, expected[s.name], inputs[rank][s.name])
            assert same_bytes({"": result.values[s.name]}, {"": held}), (rank, s)
        assert sum(result.gather.nbytes.values()) == 0, "phase two was sent"
        sent, sent_by_all_reduce = (r.scatter.nbytes for r in (result, whole[rank]))
        assert sent == sent_by_all_reduce, "phase one differs from an all-reduce's"


def test_an_owner_named_in_the_table_reduces_the_whole_segment() -> None:
    specs = parse_specs("uniform:4")
    segments = [Segment(f"p{i}", (9000,), "fp32", specs, owner) for i, owner in enumerate([2, 0, 2, 1])]
    inputs = inputs_of(segments, 3)
    assert same_bytes(agreed(reduce_on_threads(inputs, segments, Settings())), reduce_by_oracle(inputs, segments))
    layout = cut(segments, 3)
    owned = [sum(g.table.numel for piece in layout.pieces for g in piece.chunks[r].groups) for r in range(3)]
    assert owned == [9000, 9000, 18000]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_rank_owns_more_than_the_mean_and_a_stripe_for_each_parameter(world_size: int) -> None:
    segments = [segment(f"layers.{i}.weight", (i % 5 + 1) * 7001, "uniform:4") for i in range(40)]
    owned = np.zeros(world_size, np.int64)
    for chunk in (chunk for piece in cut(segments, world_size).pieces for chunk in piece.chunks):
        owned[chunk.owner] += sum(group.table.numel for group in chunk.groups)
    assert owned.sum() == sum(s.numel for s in segments)
    slack = sum(s.stripe_numel for s in segments)
    assert owned.max() <= owned.mean() + slack
    # First owners are spread by name, so that the slack is not all on rank 0.
    firsts = np.bincount([s.owners(world_size)[0] for s in segments], minlength=world_size)
    assert firsts.max() <= 40 * 2 / world_size + 5


@pytest.mark.parametrize("method", methods_of(4))
@pytest.mark.parametrize("specs", ["uniform:8/scale=fp32", EXACT, "uniform:8/scale=fp32+identity"])
def test_fp16_sums_that_overflow_on_the_way_do_not_when_the_mean_fits(specs: PhaseSpecs | str, method: str) -> None:
    segments = of_sizes(specs, "fp16", [4096, 9 * 4096 + 5])
    # A sum of two overflows; one to four quarters are exact in fp16.
    inputs = [{s.name: np.full(s.numel, 57_344, np.float16) for s in segments} for _ in range(4)]
    result = agreed(reduce_on_threads(inputs, segments, METHODS[method].settings(Op.AVG)))
    for s in segments:
        assert CARRIERS["fp16"] == result[s.name].dtype
        assert (result[s.name] == 57_344).all(), s
    # Where nothing scales, what cannot be told in fp16 is infinite and not hidden.
    total = agreed(reduce_on_threads(inputs, segments, METHODS[method].settings(Op.SUM)))
    assert not any(np.isfinite(total[s.name]).any() for s in segments)
