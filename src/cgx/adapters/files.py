"""States of compressed models beside a framework's checkpoint: one file a rank."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cgx.errors import SpecError
from cgx.torch.handle import Handle

_LOG = logging.getLogger("cgx")

PathOf = Callable[[int], Path]


def save_beside(handle: Handle, path_of: PathOf, *, step: int | None = None) -> None:
    """Writes this rank's state; local, so every rank calls it.

    A file is whole or absent: a run that is killed while it writes leaves the one before.

    Args:
        handle: Of the compressed model.
        path_of: Where the file of a rank lies.
        step: The framework's count of steps, if it has one: tells this file from one of another checkpoint.
    """
    rank, path = dist.get_rank(), path_of(dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save({"step": step, "state": handle.state_dict()}, unfinished)
    os.replace(unfinished, path)
    if rank == 0:  # an earlier run with more ranks may have left theirs
        for other in count(dist.get_world_size()):
            if not path_of(other).exists():
                break
            path_of(other).unlink(missing_ok=True)


def load_from_beside(handle: Handle, path_of: PathOf, *, step: int | None = None, hint: str = "") -> None:
    """Loads what ``save_beside`` wrote, on as many ranks or on others; local, so every rank calls it.

    Without such files training goes on from the checkpoint alone, and a warning says so: it was made without cgx.

    Args:
        handle: Of the compressed model; nothing is loaded where nothing is compressed.
        path_of: Where the file of a rank lies.
        step: As given to ``save_beside``.
        hint: What else may be the reason for missing files.

    Raises:
        SpecError: Files are missing, broken, or of another checkpoint, model or other options.
    """
    rank = dist.get_rank()
    # On a disk of its own a node sees the files of its ranks alone; a rank that is new has none.
    found = next((path for path in (path_of(rank), path_of(0)) if path.exists()), None)
    if found is None or handle.session is None:
        if rank == 0 and handle.session is not None:
            _LOG.warning(
                "no state of cgx at %s, which is right for a checkpoint that was made without cgx: training goes on "
                "from the checkpoint alone%s",
                path_of(0),
                hint,
            )
        return
    state = _load(found, step)
    if state["seed"] is None:
        return  # nothing was compressed, so nothing is owed
    if not state["residual"]:
        handle.load_state_dict(state)  # the same on all ranks
    elif state["world_size"] == dist.get_world_size():
        handle.load_state_dict(_load(path_of(rank), step))
    else:
        handle.load_state_dict(_load(path_of(saved), step) for saved in range(state["world_size"]))


def remove_beside(path_of: PathOf) -> None:
    """Removes this rank's file, if there is one."""
    path_of(dist.get_rank()).unlink(missing_ok=True)


def _load(path: Path, step: int | None) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True, mmap=True)
        state: dict[str, Any] = saved["state"]
        found = saved["step"]
    except FileNotFoundError as error:
        raise SpecError(
            f"the state of cgx at {path} is missing, while other ranks' are there; copy the files of all ranks, or "
            "remove all of them to go on without"
        ) from error
    except (KeyError, OSError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise SpecError(
            f"{path} holds no state of cgx that can be read ({error}); restore it, or remove the files of all ranks to "
            "go on without"
        ) from error
    if found != step:
        raise SpecError(
            f"the state of cgx at {path} was saved at step {found}, the checkpoint beside it at step {step}: one of "
            "them is left from another save; take another checkpoint, or remove the files of all ranks to go on without"
        )
    return state
