"""What the ranks' measurements come to, and whether they can be believed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

from cgx.cli.bench.allreduce.messages import CGX, FP16, FP32, Assignment, Measured
from cgx.cli.bench.timing import Percentiles, percentiles

# Frame and protocol headers, acknowledgements of what the peers sent, and packets sent again: 0.2 to 1.5 % of the
# payload on these links; and what a rank sends whatever the size: two barriers and the head of each small message.
_OVERHEAD_SHARE = 0.025
_OVERHEAD_NBYTES_PER_PEER = 8_000


@final
@dataclass(frozen=True)
class Contender:
    """One way to all-reduce, over all ranks.

    Attributes:
        name: `cgx`, `fp32` or `fp16`.
        time: Percentiles of the slowest rank's time.
        cpu_s_per_gb: Processor seconds of a rank per 1e9 bytes of gradient.
        sent_nbytes: Bytes a rank's interface sent in a round; None where it has no counters of its own.
        nmse: Largest relative squared error of any round.
    """

    name: str
    time: Percentiles
    cpu_s_per_gb: float
    sent_nbytes: float | None
    nmse: float


@final
@dataclass(frozen=True)
class Result:
    """The outcome; the attributes are the keys of `cgx bench allreduce --json`.

    Attributes:
        op: `all_reduce`.
        hosts: Ranks, one on each host.
        link: Rate of each host's link; "(modelled)" where no such link could be made.
        spec: Specs of both phases, in full.
        raw_nbytes: Bytes of the fp32 gradient.
        wire_nbytes: Payload bytes a rank sends per reduction, in both phases; of the rank that sends most.
        bits_per_element: 8 x payload bytes of one copy / elements, heads included; mean of both phases.
        p20_s: Seconds under which 20 of 100 reductions stayed, each timed on its slowest rank.
        p50_s: The median.
        p80_s: As p20_s, for 80.
        baseline_p50_s: The median of stock Gloo's all-reduce in fp32.
        baseline16_p50_s: The same in fp16, casts included.
        speedup: baseline_p50_s / p50_s; larger is better.
        speedup16: baseline16_p50_s / p50_s.
        goodput_bit_s: Payload bits per second of raw TCP streams of wire_nbytes, in the same directions and rounds; the
            stated rate where the link is modelled.
        wire_bound_s: 8 x wire_nbytes / goodput_bit_s, the least time that the bytes take.
        wire_efficiency: wire_bound_s / p50_s, at most 1.
        cpu_s_per_gb: Processor seconds of a rank, all its threads, per 1e9 bytes of gradient.
        nmse: Largest relative squared error of the reduced mean in any round.
        verified: Whether all checks held in every round: replicas bit-identical, errors within what the codec
            guarantees, bytes as the interface counted them, no faster than the wire.
    """

    op: str
    hosts: int
    link: str
    spec: str
    raw_nbytes: int
    wire_nbytes: int
    bits_per_element: float
    p20_s: float
    p50_s: float
    p80_s: float
    baseline_p50_s: float
    baseline16_p50_s: float
    speedup: float
    speedup16: float
    goodput_bit_s: float
    wire_bound_s: float
    wire_efficiency: float
    cpu_s_per_gb: float
    nmse: float
    verified: bool

    def to_json(self) -> str:
        """Writes it as one line, without the newline."""
        return json.dumps(asdict(self))


@final
@dataclass(frozen=True)
class Judgement:
    """The result, all contenders, and what is wrong with it.

    Attributes:
        result: The outcome.
        contenders: By name.
        faults: A sentence for each check that failed.
    """

    result: Result
    contenders: dict[str, Contender]
    faults: tuple[str, ...]


def judge(assignment: Assignment, measured: Sequence[Measured], *, link: str) -> Judgement:
    """Puts the ranks' measurements together and checks them.

    Args:
        assignment: What the ranks were told.
        measured: One of each rank, in any order.
        link: What the result says of the link.
    """
    ranks = sorted(measured, key=lambda rank: rank.rank)
    contenders = {name: _contender(name, ranks, assignment.raw_nbytes) for name in (CGX, FP32, FP16)}
    own = contenders[CGX].time
    world_size = assignment.world_size
    wire_nbytes = max(max(rank.payload_nbytes) for rank in ranks)
    goodput_bit_s = _goodput(assignment, ranks)
    wire_bound_s = 8 * wire_nbytes / goodput_bit_s
    faults = [*_result_faults(ranks), *_byte_faults(ranks, world_size)]
    if wire_bound_s > own.p50:
        faults.append(
            f"cgx took {own.p50:.4g} s, less than the {wire_bound_s:.4g} s in which raw streams moved the same bytes: "
            "one of the two was measured wrongly, so an efficiency above 1 says nothing"
        )
    # Each of the two phases carries W - 1 copies in all, from all ranks together.
    copy_nbytes = sum(statistics.fmean(rank.payload_nbytes) for rank in ranks) / (2 * (world_size - 1))
    result = Result(
        op="all_reduce",
        hosts=world_size,
        link=link,
        spec=assignment.spec,
        raw_nbytes=assignment.raw_nbytes,
        wire_nbytes=wire_nbytes,
        bits_per_element=8 * copy_nbytes / assignment.numel,
        p20_s=own.p20,
        p50_s=own.p50,
        p80_s=own.p80,
        baseline_p50_s=contenders[FP32].time.p50,
        baseline16_p50_s=contenders[FP16].time.p50,
        speedup=contenders[FP32].time.p50 / own.p50,
        speedup16=contenders[FP16].time.p50 / own.p50,
        goodput_bit_s=goodput_bit_s,
        wire_bound_s=wire_bound_s,
        wire_efficiency=wire_bound_s / own.p50,
        cpu_s_per_gb=contenders[CGX].cpu_s_per_gb,
        nmse=contenders[CGX].nmse,
        verified=not faults,
    )
    return Judgement(result, contenders, tuple(faults))


def _contender(name: str, ranks: Sequence[Measured], raw_nbytes: int) -> Contender:
    tracks = [rank.tracks[name] for rank in ranks]
    slowest = [max(seconds) for seconds in zip(*(track.seconds for track in tracks), strict=True)]
    counted = [nbytes for track in tracks for nbytes in track.counted_nbytes]
    return Contender(
        name=name,
        time=percentiles(slowest),
        cpu_s_per_gb=statistics.fmean(s for track in tracks for s in track.cpu_seconds) / (raw_nbytes / 1e9),
        sent_nbytes=statistics.fmean(counted) if counted else None,
        nmse=_worst(tracks[0].nmses),
    )


def _worst(nmses: Sequence[float]) -> float:
    """The largest, where NaN is larger than any number."""
    return max(nmses, key=lambda value: math.inf if math.isnan(value) else value)


def _goodput(assignment: Assignment, ranks: Sequence[Measured]) -> float:
    if assignment.throttle_bit_s is not None:
        return assignment.throttle_bit_s
    return 8 * ranks[0].exchanged_nbytes / statistics.median(ranks[0].goodput_seconds)


def _result_faults(ranks: Sequence[Measured]) -> Iterator[str]:
    """Replicas that differ, and errors beyond what is allowed."""
    for name, allowed in ranks[0].allowed_nmses.items():
        tracks = [rank.tracks[name] for rank in ranks]
        for index, digests in enumerate(zip(*(track.digests for track in tracks), strict=True)):
            if len(set(digests)) > 1:
                yield f"{name}, round {index}: ranks ended with different bits"
        worst = _worst(tracks[0].nmses)
        if not worst <= allowed:
            yield f"{name}: relative squared error {worst:.3g} of the mean, where {allowed:.3g} is the most allowed"


def _byte_faults(ranks: Sequence[Measured], world_size: int) -> Iterator[str]:
    """Payloads of cgx that are not what the interface sent, give or take the protocol's own bytes."""
    for rank in ranks:
        pairs = zip(rank.payload_nbytes, rank.tracks[CGX].counted_nbytes, strict=False)
        for index, (payload, counted) in enumerate(pairs):
            most = payload * (1 + _OVERHEAD_SHARE) + _OVERHEAD_NBYTES_PER_PEER * (world_size - 1)
            if not payload <= counted <= most:
                yield (
                    f"cgx, round {index}: rank {rank.rank} reports {payload} payload bytes, its interface sent "
                    f"{counted}; {payload} to {most:.0f} would agree"
                )
