"""One rank of a job as a user runs it: a program of its own, which must end by itself whatever happens.

python -m tests.faults.exits SCENARIO RANK WORLD_SIZE PORT
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import cgx
from tests.faults.jobs import VICTIM, backward, wrapped

GROUP_TIMEOUT_SECONDS = 20.0


def tidy(rank: int) -> None:
    """Train, and leave in good order."""
    model = wrapped()
    cgx.compress(model)
    backward(model, rank, 0)
    dist.destroy_process_group()


def untidy(rank: int) -> None:
    """Train and reduce by hand, and just end."""
    model = wrapped()
    cgx.compress(model)
    backward(model, rank, 0)
    cgx.all_reduce(torch.ones(500, 500))


def bereaved(rank: int) -> None:
    """Lose a rank in the middle of training, and let the error end the program."""
    model = wrapped()
    cgx.compress(model, piece_nbytes=5000)
    for number in range(10):
        backward(model, rank, number)
        if rank == VICTIM and number == 2:
            model.module[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))


def bereaved_but_tidy(rank: int) -> None:
    """Lose a rank, catch the error and leave in good order."""
    try:
        bereaved(rank)
    except cgx.PeerLostError:
        dist.destroy_process_group()


def failing(rank: int) -> None:
    """Raise on one rank, in the user's own code, while the others wait for it."""
    model = wrapped()
    cgx.compress(model)
    for number in range(10):
        if rank == VICTIM and number == 2:
            raise ZeroDivisionError("on purpose")
        backward(model, rank, number)


SCENARIOS: dict[str, Callable[[int], None]] = {
    f.__name__: f for f in (tidy, untidy, bereaved, bereaved_but_tidy, failing)
}


def main(scenario: str, rank: int, world_size: int, port: int) -> None:
    """Join the others, and play the scenario."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    )
    SCENARIOS[scenario](rank)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
