"""What must hold for a measurement to be believed: right results, honest bytes, nothing faster than the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cgx.cli.bench.allreduce.messages import Assignment, Candidate, Measured
from cgx.compressors.registry import compressor_for
from cgx.core.algorithm import cost
from cgx.core.spec import parse_specs

# Frame and protocol headers, acknowledgements of what the peers sent, and packets sent again: 0.2 to 1.5 % of the
# payload on these links; and what a rank sends whatever the size: two barriers and the head of each small message.
OVERHEAD_SHARE = 0.025
_OVERHEAD_NBYTES_PER_PEER = 8_000
# A limited link lets a millisecond's worth pass at once, and three frames at the least (`cgx.testbed.links`).
_BURST_SECONDS, _MIN_BURST_NBYTES = 1e-3, 3 * 1514


class Fault(NamedTuple):
    """A check that failed: for which contender, and a sentence."""

    name: str
    text: str


def worst(nmses: Sequence[float]) -> float:
    """The largest, where NaN is larger than any number."""
    return max(nmses, key=lambda value: math.inf if math.isnan(value) else value)


def result_faults(ranks: Sequence[Measured]) -> Iterator[Fault]:
    """Replicas that differ, and errors beyond what is allowed."""
    for name, allowed in ranks[0].allowed_nmses.items():
        tracks = [rank.tracks[name] for rank in ranks]
        for index, digests in enumerate(zip(*(track.digests for track in tracks), strict=True)):
            if len(set(digests)) > 1:
                yield Fault(name, f"{name}, round {index}: ranks ended with different bits")
        found = worst(tracks[0].nmses)
        if not found <= allowed:
            yield Fault(
                name, f"{name}: relative squared error {found:.3g} of the mean, where {allowed:.3g} is the most allowed"
            )


def byte_faults(candidate: Candidate, assignment: Assignment, ranks: Sequence[Measured]) -> Iterator[Fault]:
    """Payloads that are not what the interfaces sent, give or take the protocol's own bytes."""
    tracks, world = [rank.tracks[candidate.name] for rank in ranks], len(ranks)
    if not tracks[0].payload_nbytes or not tracks[0].counted_nbytes:
        return
    if assignment.ranks_per_host == 1:
        for rank, track in zip(ranks, tracks, strict=True):
            for index, (payload, counted) in enumerate(zip(track.payload_nbytes, track.counted_nbytes, strict=True)):
                most = payload * (1 + OVERHEAD_SHARE) + _OVERHEAD_NBYTES_PER_PEER * (world - 1)
                if not payload <= counted <= most:
                    yield _disagreement(candidate, index, f"rank {rank.rank} reports", payload, counted, payload, most)
        return
    # The ranks of a host read the same interface, the first speaks for it. What goes from host to host is a share of
    # the payload that only all hosts together keep exactly, heads aside.
    share, room = _crossing(candidate, assignment, ranks[0].numel), _OVERHEAD_NBYTES_PER_PEER * world * (world - 1)
    payloads = map(sum, zip(*(track.payload_nbytes for track in tracks), strict=True))
    counts = map(sum, zip(*(track.counted_nbytes for track in tracks[:: assignment.ranks_per_host]), strict=True))
    for index, (payload, counted) in enumerate(zip(payloads, counts, strict=True)):
        least = share * payload * (1 - OVERHEAD_SHARE) - room
        most = share * payload * (1 + OVERHEAD_SHARE) + room
        if not least <= counted <= most:
            yield _disagreement(candidate, index, "all ranks report", payload, counted, max(0, least), most)


def _crossing(candidate: Candidate, assignment: Assignment, numel: int) -> float:
    """Share of all payload bytes that goes from host to host, not from rank to rank inside one."""
    specs = parse_specs(candidate.how)
    copies = [compressor_for(spec).row_nbytes(numel, "fp32") for spec in (specs.scatter, specs.gather)]
    price = cost(
        candidate.algorithm,  # type: ignore[arg-type]  # checked where options are read
        sum(copies) / len(copies),
        world_size=assignment.world_size,
        ranks_per_node=assignment.ranks_per_host,
        intra_copy_nbytes=4 * numel,
    )
    return price.host_nbytes / (assignment.ranks_per_host * price.nbytes)


def _disagreement(
    candidate: Candidate, index: int, who: str, payload: float, counted: float, least: float, most: float
) -> Fault:
    text = (
        f"{candidate.name}, round {index}: {who} {payload} payload bytes, the interface sent {counted}; "
        f"{least:.0f} to {most:.0f} would agree"
    )
    return Fault(candidate.name, text)


def wire_faults(candidate: Candidate, seconds: float, wire_nbytes: float, goodput_bit_s: float) -> Iterator[Fault]:
    """A reduction that took less time than its bytes, but for what the link lets through at once."""
    burst_nbytes = max(goodput_bit_s / 8 * _BURST_SECONDS, _MIN_BURST_NBYTES)
    bound_s = 8 * (wire_nbytes - burst_nbytes) / goodput_bit_s
    if bound_s > seconds:
        yield Fault(
            candidate.name,
            f"{candidate.name} took {seconds:.4g} s, less than the {bound_s:.4g} s in which raw streams moved the same "
            "bytes: one of the two was measured wrongly, so an efficiency above 1 says nothing",
        )
