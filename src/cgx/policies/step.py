"""How long a training step takes when buckets are reduced while the backward pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Bucket:
    """One reduction of a step.

    Args:
        ready_s: When its gradients are there, from the start of the backward pass.
        seconds: What its reduction takes when nothing overlaps with it.
    """

    ready_s: float
    seconds: float


def exposed_seconds(backward_s: float, buckets: Sequence[Bucket]) -> float:
    """What of a step's communication is left when the backward pass ends.

    Reductions run one after another, each once its bucket is ready.

    Args:
        backward_s: Length of the backward pass.
        buckets: In the order they become ready.

    Example:
        >>> exposed_seconds(1.0, [Bucket(0.5, 0.25), Bucket(1.0, 0.25)])
        0.25

    References:
        Agarwal et al. (arXiv 2103.00543), section 4: the same schedule in closed form for equal buckets.
    """
    free_at = 0.0
    for bucket in buckets:
        free_at = max(free_at, bucket.ready_s) + bucket.seconds
    return max(0.0, free_at - backward_s)


def evenly(backward_s: float, nbytes: Sequence[float], seconds: Sequence[float]) -> list[Bucket]:
    """Buckets whose gradients come at an even rate of bytes over the backward pass.

    Args:
        backward_s: Length of the backward pass.
        nbytes: Raw bytes of each bucket, in order.
        seconds: Time of each bucket's reduction.
    """
    total, done, buckets = sum(nbytes), 0.0, []
    for size, duration in zip(nbytes, seconds, strict=True):
        done += size
        buckets.append(Bucket(backward_s * done / total, duration))
    return buckets
