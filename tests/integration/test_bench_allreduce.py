"""What `cgx bench allreduce` reads, and how it judges: it does not call a wrong measurement verified."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cgx.cli.bench.allreduce.bounds import Input, allowed
from cgx.cli.bench.allreduce.figure import find_break_even
from cgx.cli.bench.allreduce.gradients import exact_mean, make_gradient
from cgx.cli.bench.allreduce.messages import AUTO, FP16, FP32, Assignment, Candidate, Measured, Track
from cgx.cli.bench.allreduce.options import parse_candidates, parse_links, parse_sizes
from cgx.cli.bench.allreduce.paired import compare
from cgx.cli.bench.allreduce.results import judge
from cgx.cli.bench.fidelity import allowed_nmse, nmse
from cgx.core.segments import Segment
from cgx.core.spec import PhaseSpecs, Uniform
from cgx.errors import SpecError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KB", [1000]),
        ("25MB, 1KB,1KB", [1000, 25_000_000]),
        ("1KB..256KB", [1000, 4000, 16_000, 64_000, 256_000]),
        ("1KB..20KB", [1000, 4000, 16_000, 20_000]),
        ("1KB..8KB/2,4KB..8KB", [1000, 2000, 4000, 8000]),
        ("1KB..1KB", [1000]),
    ],
)
def test_sizes_are_read(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", ",", "1KB..", "..1KB", "2KB..1KB", "1KB..2KB/1", "1KB..2KB/x", "1KB..2KB/", "1..2KB"]
)
def test_sizes_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_sizes(text)


def test_lists_are_read() -> None:
    assert parse_links("1gbit,none, 1gbit") == [1e9, None]
    found = parse_candidates("uniform:4,bf16", "scatter_reduce,ring", "auto,bf16", ranks_per_host=1)
    assert [candidate.name for candidate in found] == [
        *("scatter_reduce uniform:4", "scatter_reduce bf16", "ring uniform:4", "ring bf16", "auto"),
    ]


def test_assignment_survives_the_command_line() -> None:
    assert Assignment.from_json(ASSIGNMENT.to_json()) == ASSIGNMENT


def test_gradients_of_several_runs_differ_by_rank_and_have_the_mean_of_all() -> None:
    numel = (1 << 20) + 1000
    parts = [make_gradient(numel, rank) for rank in range(3)]
    assert not any(np.array_equal(part[:1000], part[-1000:]) for part in parts)
    assert not np.array_equal(parts[0], parts[1])
    np.testing.assert_allclose(exact_mean(numel, 3), np.mean(parts, axis=0, dtype=np.float64), rtol=1e-12)


# What makes a measurement verified.

RAW_NBYTES, PAYLOAD_NBYTES, SECONDS = 10_000_000, 1_250_000, 0.2
BY_HAND = Candidate("uniform:4", "scatter_reduce")
CGX = BY_HAND.name
ASSIGNMENT = Assignment(
    candidates=(BY_HAND, Candidate(AUTO, AUTO)),
    numels=(RAW_NBYTES // 4,),
    runs=2,
    warm_up=1,
    ranks_per_host=1,
    interface="eth0",
    addresses=("10.77.0.1", "10.77.0.2"),
    goodput_port=1,
    goodput_nbytes=1000,
    throttle_bit_s=None,
    timeout_seconds=1.0,
)
FACTORS = {FP32: 8.0, FP16: 4.0, CGX: 1.0, AUTO: 1.1}  # times, relative to those of cgx
NBYTES = {FP32: 8.0, FP16: 4.0}  # likewise bytes


def honest_ranks() -> list[Measured]:
    """Two ranks whose measurements agree: 1.25 MB of payload in 200 ms at 100 Mbit/s, a bound of 100 ms."""
    rounds = 2
    return [
        Measured(
            rank=rank,
            numel=RAW_NBYTES // 4,
            tracks={
                name: Track(
                    seconds=[SECONDS * factor + 0.01 * rank] * rounds,
                    cpu_seconds=[0.01 + 0.02 * rank] * rounds,
                    counted_nbytes=[round(PAYLOAD_NBYTES * NBYTES.get(name, 1.0) * 1.01)] * rounds,
                    payload_nbytes=[PAYLOAD_NBYTES] * rounds if name == CGX else [],
                    digests=[f"{name} {index}" for index in range(rounds)],
                    nmses=[0.01] * rounds if rank == 0 else [],
                )
                for name, factor in FACTORS.items()
            },
            goodput_seconds=[0.1] * rounds,
            exchanged_nbytes=PAYLOAD_NBYTES,
            allowed_nmses=dict.fromkeys(FACTORS, 0.02) if rank == 0 else {},
            settle_calls=7,
            chosen="uniform:4 by scatter_reduce",
        )
        for rank in range(ASSIGNMENT.world_size)
    ]


def test_judge_takes_the_slowest_rank() -> None:
    judgement = judge(ASSIGNMENT, honest_ranks()[::-1], link="100mbit")
    result, auto = judgement.results
    assert not judgement.faults
    assert result.verified
    assert result.p50_s == pytest.approx(0.21)
    assert result.speedup == pytest.approx(1.61 / 0.21)
    assert result.speedup16 == pytest.approx(0.81 / 0.21)
    assert result.goodput_bit_s == pytest.approx(1e8)
    assert result.wire_efficiency == pytest.approx(0.10 / 0.21)
    assert result.bits_per_element == pytest.approx(8 * PAYLOAD_NBYTES / ASSIGNMENT.numels[0])
    assert result.cpu_s_per_gb == pytest.approx(0.02 / (RAW_NBYTES / 1e9))
    assert auto.wire_nbytes == pytest.approx(PAYLOAD_NBYTES * 1.01 / 1.025, abs=1)
    assert auto.bits_per_element is None


def test_judge_holds_auto_against_the_best_in_the_same_rounds() -> None:
    ranks = honest_ranks()
    # A disturbance that slows a whole round changes no ratio.
    for rank in ranks:
        for track in rank.tracks.values():
            track.seconds[1] *= 3
    _, auto = judge(ASSIGNMENT, ranks, link="100mbit").results
    assert auto.best == CGX
    found = (auto.auto_over_best, auto.auto_over_best_ci_low, auto.auto_over_best_ci_high)
    assert found == pytest.approx([0.23 / 0.21] * 3)
    assert auto.auto_over_fp32 == pytest.approx(0.23 / 1.61)
    assert (auto.settle_calls, auto.chosen) == (7, "uniform:4 by scatter_reduce")


def spoil(ranks: list[Measured], rank: int, name: str, **entries: list[object]) -> list[Measured]:
    """The same measurements, but for the last round of one contender on one rank."""
    track = ranks[rank].tracks[name]
    kept = {key: [*getattr(track, key)[:-1], *last] for key, last in entries.items()}
    tracks = {**ranks[rank].tracks, name: replace(track, **kept)}
    return [*ranks[:rank], replace(ranks[rank], tracks=tracks), *ranks[rank + 1 :]]


@pytest.mark.parametrize(
    ("ranks", "said", "doubted"),
    [
        pytest.param(spoil(honest_ranks(), 1, CGX, digests=["other"]), "round 1: ranks ended", CGX, id="replicas"),
        pytest.param(spoil(honest_ranks(), 0, FP16, digests=["other"]), "fp16, round 1", None, id="baseline"),
        pytest.param(spoil(honest_ranks(), 0, CGX, nmses=[0.021]), "0.021 of the mean", CGX, id="error"),
        pytest.param(spoil(honest_ranks(), 0, AUTO, nmses=[math.nan]), "nan of the mean", AUTO, id="NaN"),
        pytest.param(spoil(honest_ranks(), 1, CGX, counted_nbytes=[PAYLOAD_NBYTES - 1]), "1249999", CGX, id="too few"),
        pytest.param(spoil(honest_ranks(), 1, CGX, counted_nbytes=[1_300_000]), "1300000", CGX, id="too many"),
        pytest.param(
            [replace(rank, goodput_seconds=[0.215] * 2) for rank in honest_ranks()],
            "less than the 0.214 s in which raw streams",
            CGX,
            id="faster than the wire",
        ),
    ],
)
def test_judge_finds(ranks: list[Measured], said: str, doubted: str | None) -> None:
    judgement = judge(ASSIGNMENT, ranks, link="100mbit")
    # A baseline in doubt leaves nothing to compare with; a candidate in doubt is alone.
    for result in judgement.results:
        assert result.verified is (doubted not in (None, result.name))
    (fault,) = judgement.faults
    assert said in fault.text


@pytest.mark.parametrize(("counted", "is_verified"), [(1.0, True), (0.97, False), (1.03, False)])
def test_judge_counts_what_leaves_a_host_of_several_ranks(counted: float, is_verified: bool) -> None:
    assignment = replace(ASSIGNMENT, candidates=(BY_HAND,), ranks_per_host=2)
    # Every byte goes to all three others alike, two of them on the other host: 2 x 2/3 payloads leave a host.
    nbytes = round(counted * PAYLOAD_NBYTES * 2 * 2 / 3)
    first, second = honest_ranks()
    ranks = [replace(first, rank=0), *(replace(second, rank=rank) for rank in (1, 2, 3))]
    ranks = [
        spoil_all(rank, CGX, counted_nbytes=[10 * nbytes] * 2, payload_nbytes=[10 * PAYLOAD_NBYTES] * 2)
        for rank in ranks
    ]
    ranks = [replace(rank, goodput_seconds=[1.0] * 2, exchanged_nbytes=10**9) for rank in ranks]
    judgement = judge(assignment, ranks, link="100mbit")
    assert judgement.results[0].verified is is_verified


def spoil_all(rank: Measured, name: str, **entries: list[int]) -> Measured:
    """The same measurements, but for all rounds of one contender."""
    return replace(rank, tracks={**rank.tracks, name: replace(rank.tracks[name], **entries)})


def test_a_ratio_is_as_sure_as_its_pairs_agree() -> None:
    generator = np.random.default_rng(0)
    rounds = generator.uniform(1, 10, 50)
    steady = compare(list(1.1 * rounds), list(rounds))
    assert (steady.median, steady.low, steady.high) == pytest.approx((1.1, 1.1, 1.1))
    noisy = compare(list(rounds * generator.normal(1.1, 0.2, 50)), list(rounds))
    assert noisy.low < noisy.median < noisy.high
    assert noisy.low < 1.1 < noisy.high


@pytest.mark.parametrize(
    ("speedups", "break_even"),
    [
        ([0.5, 2.0, 4.0], 1e4),
        ([0.5, 2.0, 0.5, 2.0], 1e8),
        ([2.0, 3.0], None),
        ([0.5, 0.9], None),
        ([2.0, 0.9], None),
    ],
)
def test_break_even_is_where_it_pays_for_good(speedups: list[float], break_even: float | None) -> None:
    points = list(zip([1e3, 1e5, 1e7, 1e9], speedups, strict=False))
    assert find_break_even(points) == (None if break_even is None else pytest.approx(break_even))


WORLD, NUMEL = 4, 50_001
SPECS = PhaseSpecs(Uniform(5), Uniform(5))


def quantized(x: np.ndarray) -> np.ndarray:
    """What blocks decode to when every element is off by as much as rounding allows, up or down."""
    blocks = np.pad(x, (0, -len(x) % 128), mode="edge").reshape(-1, 128)
    step = np.ptp(blocks, axis=1, keepdims=True) / 31
    signs = np.random.default_rng(len(x)).choice([-0.5, 0.5], blocks.shape)
    return np.asarray((blocks + signs * step).reshape(-1)[: len(x)], np.float32)


def reduced(algorithm: str, parts: np.ndarray) -> np.ndarray:
    """The mean of four ranks, two on each host, by the algorithm's scheme."""
    if algorithm == "scatter_reduce":
        return quantized(np.mean([quantized(part) for part in parts], axis=0))
    if algorithm == "all_gather":
        return np.mean([quantized(part) for part in parts], axis=0)
    if algorithm == "hierarchical":
        return quantized((quantized(parts[0] + parts[1]) + quantized(parts[2] + parts[3])) / WORLD)
    stripe = Segment("x", (NUMEL,), "fp32", SPECS)
    owner = np.repeat(stripe.owners(WORLD), stripe.stripe_numel)[:NUMEL]
    total = np.zeros(NUMEL, np.float32)
    for hop in range(1, WORLD + 1):
        total += np.take_along_axis(parts, ((owner + hop) % WORLD)[None], axis=0)[0]
        if hop < WORLD:
            total = quantized(total)
    return quantized(total / WORLD)


@pytest.mark.parametrize("algorithm", ["scatter_reduce", "all_gather", "hierarchical", "ring"])
def test_allowed_error_of_an_algorithm_holds_for_its_scheme_and_not_for_a_lost_rank(algorithm: str) -> None:
    parts = np.random.default_rng(0).standard_normal((WORLD, NUMEL), np.float32)
    mean = parts.astype(np.float64).mean(axis=0)
    given = Input("x", NUMEL, WORLD, 2, lambda rank, run: parts[rank, run])
    bound = allowed(algorithm, SPECS, given, mean)
    found = nmse(reduced(algorithm, parts).astype(np.float32), mean)
    assert 0 < found < bound
    assert nmse(parts[:3].mean(axis=0), mean) > bound


def test_allowed_error_holds_for_rounding_and_not_for_a_lost_rank() -> None:
    generator = np.random.default_rng(0)
    parts = generator.standard_normal((4, 50_001), np.float32)
    mean = parts.astype(np.float64).mean(axis=0)
    specs = PhaseSpecs(Uniform(4), Uniform(4))
    allowed = allowed_nmse(specs, parts, mean)
    steps = [(part.max() - part.min()) / 15 for part in parts]
    nearest = np.mean([np.round(p / s) * s for p, s in zip(parts, steps, strict=True)], axis=0, dtype=np.float32)
    assert 0 < nmse(nearest, mean) < allowed
    assert nmse(parts[:3].mean(axis=0), mean) > allowed
