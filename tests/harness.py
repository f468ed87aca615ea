"""Ranks for tests: threads, and real processes that talk through Gloo on loopback."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, final

T = TypeVar("T")


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
