"""Named spans in profiler traces; without a profiler they cost the reading of a flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from cgx.collectives.base import Last
from cgx.transports.base import Work

_NOTHING: AbstractContextManager[Any] = nullcontext()


def is_profiled() -> bool:
    """True while a profiler runs in this process, on whichever thread it was started."""
    return bool(profiler._is_profiler_enabled)  # the flag that is not local to a thread


def span(name: str) -> AbstractContextManager[Any]:
    """What happens inside is called ``name`` in the trace of a profiler that is on."""
    return profiler.record_function(name) if is_profiled() else _NOTHING


def spanned(make: Callable[[], Sequence[Iterator[Work]]]) -> Callable[[], Sequence[Iterator[Work]]]:
    """``make``, whose pieces show their stages in a trace: encode, reduce (perhaps several) and decode.

    They run on the session's thread, which a profiler sees when it is told to record all threads.
    """

    def make_spanned() -> Sequence[Iterator[Work]]:
        return [_spanned(stages) for stages in make()] if is_profiled() else make()

    return make_spanned


def _spanned(stages: Iterator[Work]) -> Iterator[Work]:
    name = "cgx::encode"
    while True:
        with span(name):
            work = next(stages, None)
        if work is None:
            return
        yield work
        # After the last post a piece only reads what others sent.
        name = "cgx::decode" if isinstance(work, Last) else "cgx::reduce"
