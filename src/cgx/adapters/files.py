"""States of compressed models beside a framework's checkpoint: one file a rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cgx.errors import SpecError
from cgx.torch.handle import Handle

_LOG = logging.getLogger("cgx")

PathOf = Callable[[int], Path]


def save_beside(handle: Handle, path_of: PathOf) -> None:
    """Writes this rank's state; local, so every rank calls it.

    A file is whole or absent: a run that is killed while it writes leaves the one before.

    Args:
        handle: Of the compressed model.
        path_of: Where the file of a rank lies.
    """
    path = path_of(dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save(handle.state_dict(), unfinished)
    os.replace(unfinished, path)


def load_from_beside(handle: Handle, path_of: PathOf) -> None:
    """Loads what ``save_beside`` wrote, on as many ranks or on others; local, so every rank calls it.

    Without such files training goes on from the checkpoint alone, and a warning says so: it was made without cgx.

    Raises:
        SpecError: Files are missing, or of another model or other options; nothing is changed.
    """
    rank = dist.get_rank()
    # On a disk of its own a node sees the files of its ranks alone; a rank that is new has none.
    found = next((path for path in (path_of(rank), path_of(0)) if path.exists()), None)
    if found is None:
        if rank == 0:
            _LOG.warning(
                "no state of cgx at %s, which is right for a checkpoint that was made without cgx: training goes on "
                "from the checkpoint alone",
                path_of(0),
            )
        return
    saved_ranks = _load(found)["world_size"]
    if saved_ranks == dist.get_world_size():
        handle.load_state_dict(_load(path_of(rank)))
    else:
        handle.load_state_dict(_states(path_of, saved_ranks))


def remove_beside(path_of: PathOf) -> None:
    """Removes this rank's file, if there is one."""
    path_of(dist.get_rank()).unlink(missing_ok=True)


def _states(path_of: PathOf, ranks: int) -> Iterator[dict[str, Any]]:
    return (_load(path_of(rank)) for rank in range(ranks))


def _load(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise SpecError(
            f"the state of cgx at {path} is missing, while other ranks' are there. Nothing was changed; copy the files "
            "of all ranks, or remove all of them to go on without"
        ) from error
    return state
