"""What the ranks' measurements come to, and whether they can be believed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from cgx.cli.bench.allreduce.checks import OVERHEAD_SHARE, Fault, byte_faults, result_faults, wire_faults, worst
from cgx.cli.bench.allreduce.messages import AUTO, BASELINES, FP16, FP32, Assignment, Candidate, Measured
from cgx.cli.bench.allreduce.paired import Ratio, compare
from cgx.cli.bench.timing import Percentiles, percentiles
from cgx.core.spec import parse_specs


@final
@dataclass(frozen=True)
class Contender:
    """One way to all-reduce, over all ranks.

    Attributes:
        name: `fp32`, `fp16`, or a candidate's.
        seconds: The slowest rank's time, an entry a round.
        time: Percentiles of these.
        cpu_s_per_gb: Processor seconds of a rank per 1e9 bytes of gradient.
        counted_nbytes: Bytes a host's interface sent in a round; None where it has no counters of its own.
        nmse: Largest relative squared error of any round.
    """

    name: str
    seconds: tuple[float, ...]
    time: Percentiles
    cpu_s_per_gb: float
    counted_nbytes: float | None
    nmse: float


@final
@dataclass(frozen=True)
class Result:
    """One candidate at one size; the attributes are the keys of `cgx bench allreduce --json`.

    Attributes:
        op: `all_reduce`.
        hosts: Emulated hosts.
        link: Rate of each host's link; "(modelled)" where no such link could be made.
        spec: Specs of both phases, in full; `auto` where cgx chooses.
        raw_nbytes: Bytes of the fp32 gradient.
        wire_nbytes: Payload bytes that a host sends per reduction, in both phases; of the host that sends most. Where
            only the interface knows (several ranks a host, or `auto`) its count less 2.5 % for headers, barriers of
            small sizes included; None where it has no counters either.
        bits_per_element: 8 x payload bytes of one copy / elements, heads included; mean of both phases. None where
            copies of several kinds travel (hierarchical, `auto`).
        p20_s: Seconds under which 20 of 100 reductions stayed, each timed on its slowest rank.
        p50_s: The median.
        p80_s: As p20_s, for 80.
        baseline_p50_s: The median of stock Gloo's all-reduce in fp32.
        baseline16_p50_s: The same in fp16, casts included.
        speedup: baseline_p50_s / p50_s; larger is better.
        speedup16: baseline16_p50_s / p50_s.
        goodput_bit_s: Payload bits per second of raw TCP streams from host to host, in the same directions and rounds;
            the stated rate where the link is modelled.
        wire_bound_s: 8 x wire_nbytes / goodput_bit_s, the least time that the bytes take.
        wire_efficiency: wire_bound_s / p50_s. At most 1, but for small sizes: a link lets a millisecond's worth pass
            at once.
        cpu_s_per_gb: Processor seconds of a rank, all its threads, per 1e9 bytes of gradient.
        nmse: Largest relative squared error of the reduced mean in any round.
        verified: Whether all checks held in every round: replicas bit-identical, errors within what the codec and the
            algorithm guarantee (`auto`: the coarsest spec it may take), bytes as the interface counted them, no
            faster than the wire.
        ranks_per_host: Ranks on each host.
        algorithm: The reducer; `auto` where cgx chooses.
        how: The spec as it was asked for, or `auto`.
        rounds: Rounds that counted.
        counted_nbytes: Bytes that a host's interface sent per reduction, headers and all; mean over hosts and rounds.
            None where it has no counters of its own.
        settle_calls: Calls that `auto` had before the rounds, in which to choose; None for other rows, as below.
        chosen: What `auto` came to, if it says so.
        best: The fastest by hand: of the other rows of this size and Gloo in fp32, by its median.
        auto_over_best: Time of `auto` over that of `best`, median over paired rounds; smaller is better.
        auto_over_best_ci_low: Lower end of its 95 % interval.
        auto_over_best_ci_high: Upper end.
        auto_over_fp32: As auto_over_best, against Gloo in fp32.
        auto_over_fp32_ci_low: Lower end of its 95 % interval.
        auto_over_fp32_ci_high: Upper end.
    """

    op: str
    hosts: int
    link: str
    spec: str
    raw_nbytes: int
    wire_nbytes: int | None
    bits_per_element: float | None
    p20_s: float
    p50_s: float
    p80_s: float
    baseline_p50_s: float
    baseline16_p50_s: float
    speedup: float
    speedup16: float
    goodput_bit_s: float
    wire_bound_s: float | None
    wire_efficiency: float | None
    cpu_s_per_gb: float
    nmse: float
    verified: bool
    ranks_per_host: int
    algorithm: str
    how: str
    rounds: int
    counted_nbytes: float | None
    settle_calls: int | None = None
    chosen: str | None = None
    best: str | None = None
    auto_over_best: float | None = None
    auto_over_best_ci_low: float | None = None
    auto_over_best_ci_high: float | None = None
    auto_over_fp32: float | None = None
    auto_over_fp32_ci_low: float | None = None
    auto_over_fp32_ci_high: float | None = None

    @property
    def name(self) -> str:
        """The candidate's name."""
        return Candidate(self.how, self.algorithm).name

    def to_json(self) -> str:
        """Writes it as one line, without the newline."""
        return json.dumps(asdict(self))


@final
@dataclass(frozen=True)
class AutoVerdict:
    """How `auto` did.

    Attributes:
        best: Name of the fastest by hand.
        over_best: Its time over the best's.
        over_fp32: Its time over that of Gloo in fp32.
    """

    best: str
    over_best: Ratio
    over_fp32: Ratio


@final
@dataclass(frozen=True)
class Judgement:
    """All candidates at one size, the baselines, and what is wrong with the measurement.

    Attributes:
        results: One of each candidate, in the order asked for.
        contenders: Baselines and candidates, by name.
        faults: The checks that failed.
        verdict: How `auto` did; None where it did not take part.
    """

    results: tuple[Result, ...]
    contenders: dict[str, Contender]
    faults: tuple[Fault, ...]
    verdict: AutoVerdict | None

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.results[0].raw_nbytes


def judge(assignment: Assignment, measured: Sequence[Measured], *, link: str) -> Judgement:
    """Puts the ranks' measurements of one size together and checks them.

    Args:
        assignment: What the ranks were told.
        measured: One of each rank, in any order.
        link: What the results say of the link.
    """
    ranks = sorted(measured, key=lambda rank: rank.rank)
    contenders = {name: _contender(name, ranks) for name in ranks[0].tracks}
    verdict = _judge_auto(contenders) if AUTO in contenders else None
    goodput_bit_s = _goodput(assignment, ranks[0])
    faults = list(result_faults(ranks))
    results = []
    for candidate in assignment.candidates:
        wire_nbytes = _wire_nbytes(candidate, assignment, ranks)
        faults += byte_faults(candidate, assignment, ranks)
        if wire_nbytes is not None:
            faults += wire_faults(candidate, contenders[candidate.name].time.p50, wire_nbytes, goodput_bit_s)
        own, fp32, fp16 = (contenders[name] for name in (candidate.name, FP32, FP16))
        wire_bound_s = None if wire_nbytes is None else 8 * wire_nbytes / goodput_bit_s
        result = Result(
            op="all_reduce",
            hosts=len(assignment.addresses),
            link=link,
            spec=AUTO if candidate.how == AUTO else str(parse_specs(candidate.how)),
            raw_nbytes=4 * ranks[0].numel,
            wire_nbytes=wire_nbytes,
            bits_per_element=_bits_per_element(candidate, ranks),
            p20_s=own.time.p20,
            p50_s=own.time.p50,
            p80_s=own.time.p80,
            baseline_p50_s=fp32.time.p50,
            baseline16_p50_s=fp16.time.p50,
            speedup=fp32.time.p50 / own.time.p50,
            speedup16=fp16.time.p50 / own.time.p50,
            goodput_bit_s=goodput_bit_s,
            wire_bound_s=wire_bound_s,
            wire_efficiency=None if wire_bound_s is None else wire_bound_s / own.time.p50,
            cpu_s_per_gb=own.cpu_s_per_gb,
            nmse=own.nmse,
            verified={fault.name for fault in faults}.isdisjoint({candidate.name, *BASELINES}),
            ranks_per_host=assignment.ranks_per_host,
            algorithm=candidate.algorithm,
            how=candidate.how,
            rounds=len(own.seconds),
            counted_nbytes=own.counted_nbytes,
            **(_auto_keys(verdict, ranks[0]) if verdict is not None and candidate.how == AUTO else {}),
        )
        results.append(result)
    return Judgement(tuple(results), contenders, tuple(faults), verdict)


def _contender(name: str, ranks: Sequence[Measured]) -> Contender:
    tracks = [rank.tracks[name] for rank in ranks]
    slowest = tuple(max(seconds) for seconds in zip(*(track.seconds for track in tracks), strict=True))
    counted = [nbytes for track in tracks for nbytes in track.counted_nbytes]
    return Contender(
        name=name,
        seconds=slowest,
        time=percentiles(slowest),
        cpu_s_per_gb=statistics.fmean(s for track in tracks for s in track.cpu_seconds) / (4 * ranks[0].numel / 1e9),
        counted_nbytes=statistics.fmean(counted) if counted else None,
        nmse=worst(tracks[0].nmses),
    )


def _goodput(assignment: Assignment, first: Measured) -> float:
    if assignment.throttle_bit_s is not None:
        return assignment.throttle_bit_s
    return 8 * first.exchanged_nbytes / statistics.median(first.goodput_seconds)


def _wire_nbytes(candidate: Candidate, assignment: Assignment, ranks: Sequence[Measured]) -> int | None:
    """Payload bytes that a host sends; see `Result.wire_nbytes`."""
    tracks = [rank.tracks[candidate.name] for rank in ranks]
    if assignment.ranks_per_host == 1 and tracks[0].payload_nbytes:
        return max(max(track.payload_nbytes) for track in tracks)
    if tracks[0].counted_nbytes:
        return round(max(statistics.median(track.counted_nbytes) for track in tracks) / (1 + OVERHEAD_SHARE))
    return None


def _bits_per_element(candidate: Candidate, ranks: Sequence[Measured]) -> float | None:
    """Size of one copy; see `Result.bits_per_element`."""
    world = len(ranks)
    # All ranks together send so many copies: each of two phases W - 1, or every rank its own to all others.
    copies = {"scatter_reduce": 2 * (world - 1), "ring": 2 * (world - 1), "all_gather": world * (world - 1)}
    if candidate.algorithm not in copies:
        return None
    sent = sum(statistics.fmean(rank.tracks[candidate.name].payload_nbytes) for rank in ranks)
    return 8 * sent / copies[candidate.algorithm] / ranks[0].numel


def _judge_auto(contenders: dict[str, Contender]) -> AutoVerdict:
    by_hand = [contender for name, contender in contenders.items() if name not in (AUTO, FP16)]
    best = min(by_hand, key=lambda contender: contender.time.p50)
    own = contenders[AUTO].seconds
    return AutoVerdict(best.name, compare(own, best.seconds), compare(own, contenders[FP32].seconds))


def _auto_keys(verdict: AutoVerdict, first: Measured) -> dict[str, Any]:
    ratios = {"auto_over_best": verdict.over_best, "auto_over_fp32": verdict.over_fp32}
    keys: dict[str, Any] = {"settle_calls": first.settle_calls, "chosen": first.chosen, "best": verdict.best}
    for key, ratio in ratios.items():
        keys |= {key: ratio.median, f"{key}_ci_low": ratio.low, f"{key}_ci_high": ratio.high}
    return keys
