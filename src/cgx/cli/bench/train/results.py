"""What the ranks' measurements come to, and whether they can be believed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

from cgx.cli.bench.train.hows import AUTO, FP16, OFF
from cgx.cli.bench.train.messages import COMPUTE, Assignment, Measured, Track
from cgx.cli.bench.train.stopping import NEVER_SLOWER_RATIO, Interval, interval
from cgx.testbed import format_rate

# Frame and protocol headers, acknowledgements of what the peers sent, and packets sent again: 0.2 to 1.5 % of the
# payload; and what a rank sends whatever the size: barriers, tickets and the head of each small message.
_OVERHEAD_SHARE = 0.025
_OVERHEAD_NBYTES_PER_PEER = 16_000
_UNEVEN_SHARE = 0.01  # a ring's parts need not be equal


@final
@dataclass(frozen=True)
class Place:
    """Where a model is trained.

    Attributes:
        hosts: How many.
        ranks_per_host: Processes on each.
        link_bit_s: Bits per second of each host's link; None is no limit.
        is_emulated: Whether the hosts are; where they are not, all that they send shares the loopback interface.
    """

    hosts: int
    ranks_per_host: int
    link_bit_s: float | None
    is_emulated: bool = True

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    @property
    def link(self) -> str:
        """The link as `--link` takes it, and what it is instead where there is none."""
        return format_rate(self.link_bit_s) + ("" if self.is_emulated else " (loopback)")

    def __str__(self) -> str:
        ranks = f", {self.ranks_per_host} ranks on each" if self.ranks_per_host > 1 else ""
        return f"{self.hosts} hosts{ranks}, links: {self.link}"


@final
@dataclass(frozen=True)
class Result:
    """The outcome of one how; the attributes are the keys of `cgx bench train --json`.

    A step's time is its slowest rank's; of a turn of several steps it is their mean.

    Attributes:
        model: Name of the model.
        params: Elements of its gradient.
        hosts: How many.
        ranks_per_host: Processes on each.
        threads_per_rank: What torch computes with.
        link: Rate of each host's link; "(loopback)" where the hosts are not emulated.
        batch: Examples of a micro-batch.
        accumulate: Micro-batches of a step.
        data_workers: Busy processes of each rank.
        how: How gradients were averaged.
        step_p50_s: Median time of a step.
        compute_p50_s: Median time of a step entirely under `no_sync`, in the same rounds.
        baseline_p50_s: Median time of a step of stock DDP, in the same rounds.
        speedup: baseline_p50_s / step_p50_s; larger is better.
        speedup16: The median of PyTorch's fp16 hook / step_p50_s; None where it did not run.
        ratio_ci_low: Lower end of the 95 % interval of a step's time / stock DDP's; below 1 is faster.
        ratio_ci_high: Upper end.
        pass_never_slower: Whether it is not surely slower: ratio_ci_low at most 1.03.
        pairs: Rounds that counted.
        wire_nbytes_per_step: Bytes a host's interface sent, headers included; of the host that sent most. Where
            hosts are not emulated, the payload that cgx reports; None for the others there.
        exposed_comm_s: step_p50_s - compute_p50_s, at least 0.
        wait_s_per_step: Time that cgx says DDP waited for it, of the rank that waited longest; None for the others.
        cpu_s_per_step: Processor seconds of a rank, all its threads.
        grad_nmse: Relative squared error of the averaged gradient after the last step, from stock DDP's weights.
        chosen: What `auto` says is in use, and whether still on trial; None for the others.
        decisions: What `auto` says it decided on its way, with its numbers; None for the others.
        verified: Whether all checks held: replicas bit-identical, losses finite, gradients within what is promised,
            bytes as the interface counted them.
    """

    model: str
    params: int
    hosts: int
    ranks_per_host: int
    threads_per_rank: int
    link: str
    batch: int
    accumulate: int
    data_workers: int
    how: str
    step_p50_s: float
    compute_p50_s: float
    baseline_p50_s: float
    speedup: float
    speedup16: float | None
    ratio_ci_low: float
    ratio_ci_high: float
    pass_never_slower: bool
    pairs: int
    wire_nbytes_per_step: float | None
    exposed_comm_s: float
    wait_s_per_step: float | None
    cpu_s_per_step: float
    grad_nmse: float
    chosen: str | None
    decisions: list[str] | None
    verified: bool

    def to_json(self) -> str:
        """Writes it as one line, without the newline."""
        return json.dumps(asdict(self))


@final
@dataclass(frozen=True)
class Judgement:
    """The results of one model in one place, and what is wrong with them.

    Attributes:
        place: Where.
        results: One of each how, stock DDP's first.
        faults: A sentence for each check that failed.
    """

    place: Place
    results: tuple[Result, ...]
    faults: tuple[str, ...]


def judge(assignment: Assignment, measured: Sequence[Measured], *, params: int, place: Place) -> Judgement:
    """Puts the ranks' measurements together and checks them.

    Args:
        assignment: What the ranks were told.
        measured: One of each rank, in any order.
        params: Elements of the gradient.
        place: Where the ranks were.
    """
    ranks = sorted(measured, key=lambda rank: rank.rank)
    slowest = {name: _slowest(name, ranks) for name in (COMPUTE, *assignment.hows)}
    medians = {name: statistics.median(seconds) for name, seconds in slowest.items()}
    results, faults = [], []
    for how in assignment.hows:
        found = [*_outcome_faults(how, ranks), *_byte_faults(how, ranks, assignment, 4 * params, place)]
        faults += [f"{assignment.model}, {place}, {how}: {fault}" for fault in found]
        tracks, outcome = [rank.tracks[how] for rank in ranks], ranks[0].outcomes[how]
        ratio = Interval(1.0, 1.0) if how == OFF else interval(slowest[how], slowest[OFF])
        results.append(
            Result(
                model=assignment.model,
                params=params,
                hosts=place.hosts,
                ranks_per_host=place.ranks_per_host,
                threads_per_rank=ranks[0].threads,
                link=place.link,
                batch=assignment.batch,
                accumulate=assignment.accumulate,
                data_workers=assignment.data_workers,
                how=how,
                step_p50_s=medians[how],
                compute_p50_s=medians[COMPUTE],
                baseline_p50_s=medians[OFF],
                speedup=medians[OFF] / medians[how],
                speedup16=medians[FP16] / medians[how] if FP16 in medians else None,
                ratio_ci_low=ratio.low,
                ratio_ci_high=ratio.high,
                pass_never_slower=ratio.low <= NEVER_SLOWER_RATIO,
                pairs=len(slowest[how]),
                wire_nbytes_per_step=_wire_nbytes(tracks, place),
                exposed_comm_s=max(0.0, medians[how] - medians[COMPUTE]),
                wait_s_per_step=_largest_mean([track.wait_seconds for track in tracks]),
                cpu_s_per_step=statistics.fmean(s for track in tracks for s in track.cpu_seconds),
                grad_nmse=outcome.nmse,
                chosen=outcome.chosen,
                decisions=outcome.decisions,
                verified=not found,
            )
        )
    return Judgement(place, tuple(results), tuple(faults))


def _slowest(name: str, ranks: Sequence[Measured]) -> list[float]:
    return [max(seconds) for seconds in zip(*(rank.tracks[name].seconds for rank in ranks), strict=True)]


def _largest_mean(entries: Sequence[Sequence[float]]) -> float | None:
    """The largest of the ranks' means; None where they have none."""
    return max((statistics.fmean(values) for values in entries if values), default=None)


def _wire_nbytes(tracks: Sequence[Track], place: Place) -> float | None:
    # Ranks of a host share its interface: any of them tells what it sent, and together they told cgx's payload.
    counted = _largest_mean([track.counted_nbytes for track in tracks])
    payload = _largest_mean([track.payload_nbytes for track in tracks])
    if counted is not None or payload is None:
        return counted
    return payload * place.ranks_per_host


def _outcome_faults(how: str, ranks: Sequence[Measured]) -> Iterator[str]:
    """Replicas that differ, losses that are no numbers, and gradients off by more than is promised."""
    if len({rank.outcomes[how].digest for rank in ranks}) > 1:
        yield "ranks ended with different weights"
    for rank in ranks:
        lost = [loss for loss in rank.tracks[how].losses if not math.isfinite(loss)]
        if lost:
            yield f"rank {rank.rank}: {len(lost)} losses are not finite, such as {lost[0]}"
    outcome = ranks[0].outcomes[how]
    allowed = math.inf if outcome.allowed_nmse is None else outcome.allowed_nmse
    if not (math.isfinite(outcome.nmse) and outcome.nmse <= allowed):
        yield f"relative squared error {outcome.nmse:.3g} of the gradient, where {allowed:.3g} is the most allowed"


def _byte_faults(
    how: str, ranks: Sequence[Measured], assignment: Assignment, raw_nbytes: int, place: Place
) -> Iterator[str]:
    """Payloads that are not what the interface sent, give or take the protocol's own bytes.

    Known for stock DDP, whose all-reduce is a ring, and for a spec of cgx's, which reports its payload; but not where
    ranks share a host, since what they tell each other passes no interface.
    """
    peers = place.world_size - 1
    for rank in ranks:
        track = rank.tracks[how]
        is_known = how == OFF or (track.payload_nbytes and how != AUTO)
        if place.ranks_per_host > 1 or not track.counted_nbytes or not is_known:
            continue
        ring = 2 * peers / place.world_size * raw_nbytes
        payload = ring if how == OFF else statistics.fmean(track.payload_nbytes)
        least = payload * (1 - _UNEVEN_SHARE)
        most = payload * (1 + _OVERHEAD_SHARE) + _OVERHEAD_NBYTES_PER_PEER * peers
        most += rank.buffers_nbytes * peers * assignment.accumulate
        counted = statistics.median(track.counted_nbytes)
        if not least <= counted <= most:
            yield (
                f"rank {rank.rank} should have sent {payload:.0f} payload bytes a step, its interface sent "
                f"{counted:.0f}; {least:.0f} to {most:.0f} would agree"
            )
