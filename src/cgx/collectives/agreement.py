"""Ranks compare what they are about to do, and say where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgx.collectives.base import TICKET_NBYTES
from cgx.core.plan import fingerprint
from cgx.errors import PlanMismatchError, TransportError
from cgx.transports.base import Bytes, Channel, Transport


def agree(lines: Sequence[str], lane: Transport, *, about: str) -> None:
    """Compares the digest of ``lines`` over all ranks; blocks.

    Args:
        lines: What must be equal, a line each.
        lane: Idle on every rank.
        about: What the lines describe, for the error.

    Raises:
        PlanMismatchError: On every rank, when any two differ; names the first difference.
        TransportError: A peer is gone or silent.

    Cost: one step of 8 bytes; two more only when ranks differ.
    """
    # As large as a ticket, and on its channel: a peer that is in a reduction instead reads it as another one's.
    mine = np.frombuffer(fingerprint(lines)[:TICKET_NBYTES], np.uint8).copy()
    digests = _gather(mine, [TICKET_NBYTES] * lane.world_size, lane, Channel.TICKET)
    odd = [rank for rank, digest in enumerate(digests) if bytes(digest) != bytes(mine)]
    if not odd:
        return
    text = np.frombuffer("\n".join(lines).encode(), np.uint8).copy()
    size = np.array([text.nbytes], np.int64).view(np.uint8)
    try:
        sizes = [int(s.view(np.int64)[0]) for s in _gather(size, [8] * lane.world_size, lane, Channel.SIZES)]
        texts = [bytes(t).decode().split("\n") for t in _gather(text, sizes, lane, Channel.BODY)]
    except TransportError as error:
        raise PlanMismatchError(
            f"rank {odd[0]} does something else while this rank compares {about}: ranks must reduce the same tensors, "
            "in the same order, the same number of times; look for a branch that only some ranks take"
        ) from error
    raise PlanMismatchError(_difference(texts, about))


def _gather(mine: Bytes, sizes: Sequence[int], lane: Transport, channel: Channel) -> list[Bytes]:
    received = [np.empty(size, np.uint8) for size in sizes]
    received[lane.rank] = mine
    others: list[Bytes | None] = [None if r == lane.rank else b for r, b in enumerate(received)]
    lane.all_gather(mine, others, channel).wait()
    return received


def _difference(texts: Sequence[Sequence[str]], about: str) -> str:
    first = texts[0]
    rank = next(r for r, text in enumerate(texts) if list(text) != list(first))
    other = texts[rank]
    length = max(len(first), len(other))
    padded = [[*text, *["(nothing)"] * (length - len(text))] for text in (first, other)]
    a, b = next((a, b) for a, b in zip(*padded, strict=True) if a != b)
    return (
        f"ranks disagree about {about}, so they could not read each other's bytes. First difference: rank 0 has "
        f"'{a}', rank {rank} has '{b}'. Build the same model with the same options on every rank."
    )
