"""The worker that moves pieces: one thread per session, one agreed order.

At every tick it starts the next piece, if there is one, and resumes the pieces whose turn has come, oldest first. A
piece rests ``DEPTH`` ticks after each post, which is when the wire works for it. The order of posts on each lane is
therefore the order of pieces, on every rank, however differently their reductions arrive; that is what makes two lanes
safe where callbacks are not (``docs/adr/0004``).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from cgx.errors import CgxError, TransportError
from cgx.transports.base import Work

DEPTH = 2  # ticks between posting and waiting: two pieces on the wire while a third is encoded
_LIMIT = 8  # pieces in flight; bounds the memory of payload buffers

Done = Callable[[BaseException | None], None]


@final
@dataclass(frozen=True, slots=True)
class Job:
    """The pieces of one reduction.

    Args:
        label: What error messages call it.
        make: Builds the generators of the pieces; runs on the worker.
        done: Called once on the worker, with None or the error.
    """

    label: str
    make: Callable[[], Sequence[Iterator[Work]]]
    done: Done


class _Running:
    """A job whose pieces are under way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.left = 1  # unfinished, also while its pieces are being made

    def start(self) -> list[_Active]:
        pieces = [_Active(self, stages) for stages in self.job.make()]
        self.left = len(pieces)
        if not pieces:
            self.job.done(None)
        return pieces

    def finish_piece(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.job.done(None)


class _Active:
    """A piece between two of its stages."""

    def __init__(self, running: _Running, stages: Iterator[Work]) -> None:
        self.running, self.stages = running, stages
        self.work: Work | None = None
        self.due = 0

    def advance(self, tick: int) -> bool:
        """Waits for what was posted, computes, posts the next; False when the piece is finished."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self.stages, None)
        self.due = tick + DEPTH
        return self.work is not None


@final
class Pipeline:
    """Runs jobs in the order they are submitted, several pieces at a time.

    Args:
        name: Name of the thread.
        on_failure: Called once when a job fails, before anybody hears of it: closes the lanes, so that peers do.
    """

    def __init__(self, name: str, *, on_failure: Callable[[], None]) -> None:
        self._name, self._on_failure = name, on_failure
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            TransportError: An earlier job failed; the pipeline runs nothing more.
        """
        with self._lock:
            self.check()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._inbox.put(job)

    def check(self) -> None:
        """Raises TransportError when an earlier job failed."""
        if self._error is not None:
            raise TransportError(
                "this session is broken by an earlier failure and reduces nothing more; restart the job from its last "
                f"checkpoint (first failure: {self._error})"
            )

    def close(self, timeout_seconds: float) -> None:
        """Lets queued jobs finish and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join(timeout_seconds)

    def _run(self) -> None:
        active: deque[_Active] = deque()
        ready: deque[_Active] = deque()
        running: list[_Running] = []
        tick, is_open = 0, True
        try:
            while is_open or active or ready:
                is_open = self._receive(ready, running, wait=not (active or ready)) and is_open
                running = [r for r in running if r.left]
                if ready and len(active) < _LIMIT:
                    active.append(ready.popleft())
                for piece in list(active):
                    if piece.due <= tick and not piece.advance(tick):
                        active.remove(piece)
                        piece.running.finish_piece()
                tick += 1
        except BaseException as error:  # every waiting caller must hear of it, whatever it is
            self._fail(error, running)

    def _receive(self, ready: deque[_Active], running: list[_Running], *, wait: bool) -> bool:
        """Moves submitted jobs to ``ready``; False once the pipeline is closed."""
        while True:
            try:
                job = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            run = _Running(job)
            running.append(run)
            ready.extend(run.start())
            wait = False

    def _fail(self, error: BaseException, running: list[_Running]) -> None:
        with self._lock:
            self._error = error
        with suppress(Exception):  # the failure at hand is the one to report
            self._on_failure()
        jobs = [run.job for run in running if run.left]
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                jobs.append(job)
        for job in jobs:
            job.done(_about(job.label, error))


def _about(label: str, error: BaseException) -> BaseException:
    """The error with the reduction it struck, in the same class when it is one of ours."""
    if isinstance(error, CgxError):
        named = type(error)(f"{label}: {error}")
        named.__cause__ = error
        return named
    named = TransportError(f"{label}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
