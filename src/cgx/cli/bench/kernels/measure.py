"""Times subjects on one core and gives a row for each operation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, final

from cgx.cli.bench.kernels.subject import Operation, Subject
from cgx.cli.bench.timing import percentiles

_WARM_UP_ROUNDS = 2


@final
@dataclass(frozen=True)
class Row:
    """One operation; the attributes are the keys of `cgx bench kernels --json`.

    Attributes:
        op: `encode`, `decode`, `decode_add`, or `reduce_N`: the fused reduction of N payloads and the own part.
        spec: In full.
        dtype: Of the gradient.
        raw_nbytes: Bytes of the gradient.
        bits_per_element: 8 x payload bytes / elements.
        p20_s: Seconds under which 20 of 100 rounds stayed.
        p50_s: The median.
        p80_s: As p20_s, for 80.
        raw_byte_s: Gradient bytes per second at the median.
        baseline: `memcpy` of the same gradient, or `steps_N`: the reduction by decode-add, scale, encode and decode.
        baseline_p50_s: Its median in the same rounds.
        ratio: baseline_p50_s / p50_s; larger is better.
        verified: Whether the last round's result was right: decoded within the declared bound, added exactly, reduced
            to the bits of the baseline.
    """

    op: str
    spec: str
    dtype: str
    raw_nbytes: int
    bits_per_element: float
    p20_s: float
    p50_s: float
    p80_s: float
    raw_byte_s: float
    baseline: str
    baseline_p50_s: float
    ratio: float
    verified: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@contextmanager
def one_core() -> Iterator[int]:
    """Confines this process, and what it starts meanwhile, to one core; yields its number."""
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, allowed)


def measure(subject: Subject, runs: int, on_round: Callable[[], None]) -> list[Row]:
    """Times the operations of ``subject`` in ``runs`` rounds, each of which runs all of them once.

    Args:
        subject: What to time.
        runs: Rounds that count; two more come before.
        on_round: Called after each round.
    """
    operations = subject.operations()
    seconds: dict[str, list[float]] = {operation.name: [] for operation in operations}
    right = {operation.name: True for operation in operations}
    total = _WARM_UP_ROUNDS + runs
    for index in range(total):
        for operation in operations:
            seconds[operation.name].append(_time(operation))
            if index == total - 1:
                right[operation.name] = operation.is_right()
        on_round()
    counted = {name: values[_WARM_UP_ROUNDS:] for name, values in seconds.items()}
    return [_row(subject, operation, counted, right[operation.name]) for operation in operations if operation.baseline]


def rounds(runs: int) -> int:
    """How often ``measure`` calls ``on_round``."""
    return _WARM_UP_ROUNDS + runs


def _time(operation: Operation) -> float:
    operation.prepare()
    start = time.perf_counter()
    operation.run()
    return time.perf_counter() - start


def _row(subject: Subject, operation: Operation, seconds: Mapping[str, Sequence[float]], verified: bool) -> Row:
    assert operation.baseline is not None
    own, baseline = (percentiles(seconds[name]) for name in (operation.name, operation.baseline))
    return Row(
        op=operation.name,
        spec=str(subject.spec),
        dtype=subject.dtype,
        raw_nbytes=subject.raw_nbytes,
        bits_per_element=subject.bits_per_element,
        p20_s=own.p20,
        p50_s=own.p50,
        p80_s=own.p80,
        raw_byte_s=subject.raw_nbytes / own.p50,
        baseline=operation.baseline,
        baseline_p50_s=baseline.p50,
        ratio=baseline.p50 / own.p50,
        verified=verified,
    )
