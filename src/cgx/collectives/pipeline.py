"""The worker that moves pieces: one thread per session, one agreed order.

A job goes in ticks of its own. At each it starts its next piece, if there is one, and resumes the pieces whose turn has
come, oldest first; a piece rests ``DEPTH`` ticks after each post, which is when the wire works for it. So the posts and
waits of a job have one order, the same on every rank.

The next job starts as soon as all pieces of the one in front are started, but waits for nothing until that one has
posted everything. A rank that hears of the next job late is then never waited for by one whose posts it needs itself,
however differently jobs arrive; that is what makes two lanes safe where callbacks are not (``docs/adr/0004``).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from cgx.collectives.base import Last
from cgx.errors import CgxError, TransportError
from cgx.transports.base import Work

_LEAVE_SECONDS = 2.0  # of the process's end, for a worker that still waits for a peer
DEPTH = 2  # ticks between posting and waiting: two pieces on the wire while a third is encoded

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


@final
class _Active:
    """A piece between two of its stages."""

    def __init__(self, stages: Iterator[Work], tick: int) -> None:
        self.due, self._stages = tick, stages
        self.work: Work | None = None

    def advance(self, tick: int) -> bool:
        """Waits for what was posted, computes, posts the next; False when the piece is finished."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self._stages, None)
        self.due = tick + DEPTH
        return self.work is not None


@final
class _Running:
    """A job under way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tick = 0
        self._unstarted = deque(job.make())
        self._active: list[_Active] = []

    @property
    def waits_next(self) -> bool:
        """True when the next tick may wait for a peer and post payloads.

        At the ticks before nothing is due, and the pieces that start there post the reduction's ticket alone.
        """
        return self._tick >= DEPTH

    @property
    def has_started_all(self) -> bool:
        """True when every piece is encoded."""
        return not self._unstarted

    @property
    def has_posted_all(self) -> bool:
        """True when no peer can be waiting for anything that this rank has yet to post."""
        return not self._unstarted and all(isinstance(piece.work, Last) for piece in self._active)

    @property
    def is_finished(self) -> bool:
        """True when every piece is where it belongs."""
        return not self._unstarted and not self._active

    def advance(self) -> None:
        """One tick."""
        if self._unstarted:
            self._active.append(_Active(self._unstarted.popleft(), self._tick))
        self._active = [piece for piece in self._active if piece.due > self._tick or piece.advance(self._tick)]
        self._tick += 1


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
                # An interpreter that ends under a daemon's C++ frames aborts: the thread ends before it does.
                weakref.finalize(self, _leave, self._inbox, self._thread)
            self._inbox.put(job)

    def check(self) -> None:
        """Raises TransportError when an earlier job failed."""
        if self._error is not None:
            raise TransportError(
                "this session is broken by an earlier failure and reduces nothing more; restart the job from its last "
                f"checkpoint (first failure: {self._error})"
            )

    def fail(self, error: BaseException) -> None:
        """Breaks the pipeline, once, as a failing job would: an exchange beside it failed."""
        with self._lock:
            is_first, self._error = self._error is None, self._error or error
        if is_first:
            with suppress(Exception):  # the failure at hand is the one to report
                self._on_failure()

    def close(self, timeout_seconds: float) -> None:
        """Lets queued jobs finish and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            if thread is not threading.current_thread():  # which may collect a model that nobody holds any more
                thread.join(timeout_seconds)

    def _run(self) -> None:
        jobs: deque[Job] = deque()
        running: list[_Running] = []
        is_open = True
        job: Job | None = None
        try:
            while is_open or jobs or running:
                is_open = self._receive(jobs, wait=not (jobs or running)) and is_open
                if jobs and (not running or running[-1].has_started_all):
                    job = jobs[0]
                    running.append(_Running(job))
                    jobs.popleft()
                may_wait = True
                for run in list(running):
                    job = run.job
                    if may_wait or not run.waits_next:
                        run.advance()
                    may_wait = may_wait and run.has_posted_all
                    if run.is_finished:
                        running.remove(run)
                        job.done(None)
        except BaseException as error:  # every waiting caller must hear of it, whatever it is
            self._fail(_about(job, error), [*(run.job for run in running), *jobs])

    def _receive(self, jobs: deque[Job], *, wait: bool) -> bool:
        """Moves submitted jobs to ``jobs``; False once the pipeline is closed."""
        while True:
            try:
                job = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            jobs.append(job)
            wait = False

    def _fail(self, error: BaseException, jobs: list[Job]) -> None:
        with self._lock:
            self._error = error
        with suppress(Exception):  # the failure at hand is the one to report
            self._on_failure()
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                jobs.append(job)
        for job in jobs:
            job.done(error)


def _leave(inbox: queue.SimpleQueue[Job | None], thread: threading.Thread) -> None:
    inbox.put(None)
    thread.join(_LEAVE_SECONDS)


def _about(job: Job | None, error: BaseException) -> BaseException:
    """The error with the reduction it struck, in the same class when it is one of ours."""
    label = "the pipeline" if job is None else job.label
    if isinstance(error, CgxError):
        named: CgxError = type(error)(f"{label}: {error}")
    else:
        named = TransportError(f"{label}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
