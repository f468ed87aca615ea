"""Ranks for tests: threads with taps on their lanes, and real processes that talk through Gloo on loopback."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import BufferPool, Op, Reduction, stages_of
from cgx.collectives.layout import cut
from cgx.collectives.pipeline import Job, Pipeline
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import Segment
from cgx.errors import TransportError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Transport, Work, broadcast_buffers
from cgx.transports.threads import ThreadHub

T = TypeVar("T")
Array = NDArray[Any]
Values = Mapping[str, Array]
# What a tap does to a message on its way out: (channel, number of the post on it, peer, bytes) to bytes.
Change = Callable[[Channel, int, int, Bytes], Bytes]

SECONDS_FOR_THREADS = 4.0
_TAGS_APART = 1 << 20  # more than pieces in a reduction


def run_threads(world_size: int, rank_main: Callable[[int], T]) -> list[T]:
    """Run `rank_main(rank)` on a thread per rank; return their results, or raise the error that came first."""
    results: list[Any] = [None] * world_size
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def run(rank: int) -> None:
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()
    return results


@final
class Tap:
    """A transport that counts and keeps what leaves through it, and may change it on the way."""

    def __init__(self, transport: Transport, change: Change | None = None) -> None:
        self._transport, self._change = transport, change
        self.nbytes: Counter[Channel] = Counter()
        self.posts: Counter[Channel] = Counter()
        self.messages: list[tuple[Channel, int, Bytes]] = []

    @property
    def rank(self) -> int:
        """See `Transport.rank`."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """See `Transport.world_size`."""
        return self._transport.world_size

    @property
    def sent_nbytes(self) -> int:
        """See `Transport.sent_nbytes`."""
        return self._transport.sent_nbytes

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See `Transport.all_to_all`."""
        changed: list[Bytes | None] = []
        for peer, buffer in enumerate(send):
            if buffer is not None and peer != self.rank:
                self.nbytes[channel] += buffer.nbytes
                self.messages.append((channel, peer, buffer.copy()))
                if self._change is not None:
                    buffer = self._change(channel, self.posts[channel], peer, buffer.copy())
            changed.append(buffer)
        self.posts[channel] += 1
        return self._transport.all_to_all(changed, recv, channel)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See `Transport.all_gather`."""
        return self.all_to_all(broadcast_buffers(send, recv, self.rank), recv, channel)

    def all_reduce(self, x: Any) -> Work:
        """See `Transport.all_reduce`."""
        return self._transport.all_reduce(x)

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()


@final
@dataclass(frozen=True)
class Settings:
    """How thread ranks reduce.

    Args:
        buckets: Names of the segments of each flat buffer, in order; by default all in one.
        reduction_index: How many times every parameter was reduced before.
        tags: Tag of each rank's reductions; by default the same on all.
        pause_seconds: How long a rank waits before each bucket, so that ranks arrive apart.
        changes: What leaves the ranks' (scatter lane, gather lane).
    """

    op: Op = Op.SUM
    buckets: Sequence[Sequence[str]] | None = None
    piece_nbytes: int | None = None
    seed: int = 0
    reduction_index: int = 0
    scatter_only: bool = False
    tags: Sequence[int] | None = None
    pause_seconds: Sequence[float] = ()
    changes: Mapping[int, tuple[Change | None, Change | None]] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class RankResult:
    """What a reduction left on one rank."""

    values: dict[str, Array]
    scatter: Tap
    gather: Tap
    error: BaseException | None


def reduce_on_threads(
    inputs: Sequence[Values], segments: Sequence[Segment], settings: Settings, *,
    residuals: Sequence[NDArray[np.float32]] | None = None,
) -> list[RankResult]:  # fmt: skip
    """Reduce every rank's `inputs[rank]` through the real reducer, layout and pipeline; raise nothing.

    Args:
        inputs: Flat arrays by segment name, one mapping per rank.
        segments: All segments, in the order of the residual arena.
        settings: How.
        residuals: Each rank's arena, changed in place.
    """
    world = len(inputs)
    hubs = [ThreadHub(world, timeout_seconds=SECONDS_FOR_THREADS) for _ in range(2)]
    return run_threads(
        world,
        lambda rank: _reduce_on_rank(
            rank, hubs, inputs[rank], segments, settings, None if residuals is None else residuals[rank]
        ),
    )


def _reduce_on_rank(
    rank: int, hubs: Sequence[ThreadHub], inputs: Values, segments: Sequence[Segment], settings: Settings,
    residual: NDArray[np.float32] | None,
) -> RankResult:  # fmt: skip
    changes = settings.changes.get(rank, (None, None))
    scatter, gather = (Tap(hub.transport(rank), change) for hub, change in zip(hubs, changes, strict=True))

    def close_lanes() -> None:
        scatter.close()
        gather.close()

    named = {segment.name: segment for segment in segments}
    first_state = _starts(segments)
    pipeline, pool = Pipeline(f"rank-{rank}-pipeline", on_failure=close_lanes), BufferPool()
    answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    refusals: list[BaseException | None] = []
    values: dict[str, Array] = {}
    submitted = 0
    for index, names in enumerate(settings.buckets or [list(named)]):
        if settings.pause_seconds:
            time.sleep(settings.pause_seconds[rank])
        bucket = [named[name] for name in names]
        flat = np.concatenate([inputs[name].reshape(-1) for name in names])
        values |= {s.name: flat[at : at + s.numel] for s, at in zip(bucket, _starts(bucket).values(), strict=True)}
        reduction = Reduction(
            label=f"bucket {index}",
            x=flat,
            layout=cut(
                bucket,
                hubs[0].world_size,
                piece_nbytes=settings.piece_nbytes,
                states=[None if residual is None else first_state[name] for name in names],
            ),
            keys=parameter_keys(
                settings.seed,
                np.array([name_hash(name) for name in names], np.uint64),
                np.full(len(names), settings.reduction_index, np.uint64),
            ),
            op=settings.op,
            scatter_lane=scatter,
            gather_lane=gather,
            pool=pool,
            tag=_TAGS_APART * (1 + index) if settings.tags is None else settings.tags[rank],
            residual=residual,
        )
        make = partial(stages_of, ScatterReduce(), reduction.layout, reduction, scatter_only=settings.scatter_only)
        try:
            pipeline.submit(Job(reduction.label, make, answers.put))
            submitted += 1
        except TransportError as error:
            refusals.append(error)
    errors = [answers.get() for _ in range(submitted)] + refusals
    pipeline.close(SECONDS_FOR_THREADS)
    return RankResult(values, scatter, gather, next((e for e in errors if e is not None), None))


def _starts(segments: Sequence[Segment]) -> dict[str, int]:
    """First element of each segment in their concatenation."""
    ends = np.cumsum([segment.numel for segment in segments]).tolist()
    return {s.name: end - s.numel for s, end in zip(segments, ends, strict=True)}


@final
@dataclass(frozen=True)
class Outcome:
    """How one rank's process ended.

    Args:
        value: What its main function returned.
        error: What it raised.
        trace: The error's traceback, or the stacks of all threads when the rank had to be killed.
        exit_code: As `multiprocessing` has it; None when the rank had to be killed.
        seconds: From the start of its main function to its end.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def run_processes(
    rank_main: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0,
    group_timeout_seconds: float = 20.0,
) -> list[Any]:  # fmt: skip
    """Run `rank_main(rank, *args)` in a process per rank, in a Gloo group; return the results.

    `rank_main` and its arguments travel by pickle: a function at the top of a module.

    Raises:
        AssertionError: A rank raised, died or did not end in time; has all their tracebacks.
    """
    outcomes = outcomes_of(
        rank_main, world_size, *args, timeout_seconds=timeout_seconds, group_timeout_seconds=group_timeout_seconds
    )
    bad = [(rank, o) for rank, o in enumerate(outcomes) if o.error is not None or o.exit_code != 0]
    if bad:
        told = [f"rank {rank}, exit code {o.exit_code}: {o.error!r}\n{o.trace}" for rank, o in bad]
        raise AssertionError("\n".join(told))
    return [outcome.value for outcome in outcomes]


def outcomes_of(
    rank_main: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0,
    group_timeout_seconds: float = 20.0, doomed: Sequence[int] = (),
) -> list[Outcome]:  # fmt: skip
    """Like `run_processes`, but report how each rank ended instead of raising.

    Args:
        rank_main: Runs in each process.
        world_size: Processes.
        args: More arguments for `rank_main`.
        timeout_seconds: After which ranks that have not ended are killed.
        group_timeout_seconds: Timeout of the default group.
        doomed: Ranks that will not end by themselves; killed once the others have ended.
    """
    from torch.distributed import TCPStore

    context = _fork_server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        stacks = [Path(folder, f"stacks-{rank}") for rank in range(world_size)]
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_process_main,
                args=(rank_main, args, rank, world_size, store.port, group_timeout_seconds, theirs, stacks[rank]),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout_seconds
        patient = {p.sentinel for rank, p in enumerate(processes) if rank not in doomed}
        outcomes: list[Outcome | None] = [None] * world_size
        while patient and (left := deadline - time.monotonic()) > 0:
            ready = wait([*patient, *(pipe for pipe, o in zip(pipes, outcomes, strict=True) if o is None)], left)
            patient -= set(ready)  # type: ignore[arg-type]
            for rank, pipe in enumerate(pipes):
                if pipe in ready:
                    outcomes[rank] = _received(pipe)
        return [
            _ended(process, outcomes[rank], stacks[rank], is_late=process.sentinel in patient)
            for rank, process in enumerate(processes)
        ]


def _received(pipe: Connection) -> Outcome:
    try:
        outcome: Outcome = pipe.recv()
    except EOFError:  # it died
        return Outcome()
    return outcome


def _ended(process: Any, outcome: Outcome | None, stacks: Path, *, is_late: bool) -> Outcome:
    """The outcome with its exit code; kills the process if it still runs."""
    outcome = outcome or Outcome()
    if process.is_alive() and is_late:
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        process.kill()
        process.join()
        return replace(outcome, trace=f"{outcome.trace}\nkilled; it was here:\n{stacks.read_text()}")
    if process.is_alive():
        process.kill()
    process.join()
    return replace(outcome, exit_code=process.exitcode)


@cache
def _fork_server() -> Any:
    """A server without threads that has imported everything slow: processes forked off it start in no time."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _process_main(
    rank_main: Callable[..., Any], args: Sequence[Any], rank: int, world_size: int, port: int,
    group_timeout_seconds: float, pipe: Connection, stacks: Path,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Complex modules are a new feature")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_seconds)
    )
    start = time.monotonic()
    try:
        outcome = Outcome(value=rank_main(rank, *args))
    except BaseException as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    try:
        pickle.dumps(outcome)
    except Exception:
        outcome = Outcome(error=RuntimeError(repr(outcome.error or outcome.value)), trace=outcome.trace)
    pipe.send(replace(outcome, seconds=time.monotonic() - start))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
