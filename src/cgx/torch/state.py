"""What a handle saves and loads: the state of one rank, and how states of another world size are folded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from cgx.core.segments import Segment
from cgx.errors import SpecError
from cgx.torch.session import Session
from cgx.torch.tuner import Tuner

_LOG = logging.getLogger("cgx")
_VERSION = 2
State = Mapping[str, Any]


def saved_state(
    session: Session | None, names: Iterable[str], *, rank: int, world_size: int, tuner: Tuner | None
) -> dict[str, Any]:
    """This rank's state as numbers, text and fp32 tensors (copies); local, not collective."""
    state: dict[str, Any] = {"version": _VERSION, "rank": rank, "world_size": world_size, "seed": None}
    state |= {"plan": {}, "reduction_index": {}, "residual": {}, "auto": None if tuner is None else tuner.state_dict()}
    if session is None:
        return state
    specs = session.plans[session.method.plan if tuner is None else tuner.choice]
    counted = dict(zip(session.shapes, session.reduction_index.tolist(), strict=True))
    for name in names:
        state["plan"][name], state["reduction_index"][name] = str(specs[name]), counted[name]
    if session.residual is not None:
        for name, at in session.state_offsets.items():
            shape = session.shapes[name]
            flat = torch.from_numpy(session.residual)[at : at + torch.Size(shape).numel()]
            state["residual"][name] = flat.view(shape).clone()
    return state | {"seed": session.seed}


def load_state(session: Session | None, mine: State, given: State | Iterable[State], tuner: Tuner | None) -> None:
    """Goes on from this rank's saved state, or from those of all ranks of a group of another size.

    Args:
        session: None when nothing is compressed: then the state is only checked.
        mine: What ``saved_state`` returns now.
        given: One state, or the states of all ranks in any order, taken one at a time.
        tuner: Of ``auto``.

    Raises:
        SpecError: A state does not fit; nothing is changed.
    """
    chosen, owed = _chosen(mine, [given] if isinstance(given, Mapping) else given, is_auto=tuner is not None)
    if session is None:
        return
    for at, name in enumerate(session.shapes):
        session.reduction_index[at] = chosen["reduction_index"].get(name, session.reduction_index[at])
    if session.residual is not None:
        is_folded = chosen["world_size"] != mine["world_size"]
        for name, at in session.state_offsets.items():
            flat = owed[name].reshape(-1).numpy()
            kept = flat * _shares(session, name, mine["rank"]) if is_folded else flat
            session.residual[at : at + len(flat)] = kept
    if tuner is not None and chosen["auto"] is not None and chosen["world_size"] == mine["world_size"]:
        tuner.load_state_dict(chosen["auto"])
    if tuner is None and chosen["plan"] != mine["plan"] and mine["rank"] == 0:
        name = next(n for n, spec in mine["plan"].items() if chosen["plan"].get(n) != spec)
        _LOG.info(
            "the loaded state was taken with %s for %s, now it is %s: training goes on, with other bits",
            chosen["plan"].get(name), name, mine["plan"][name],
        )  # fmt: skip


def _chosen(mine: State, states: Iterable[State], *, is_auto: bool) -> tuple[State, dict[str, torch.Tensor]]:
    """The state to go on from, and what is owed by parameter: its residual, or the mean over all saved ranks."""
    first: State | None = None
    own: State | None = None
    ranks: list[int] = []
    owed: dict[str, torch.Tensor] = {}
    for state in states:
        _check(mine, state, is_auto=is_auto)
        if first is None:
            first = {**state, "residual": {}}  # lets go of the tensors
        for field in ("world_size", "seed", "reduction_index"):
            if state[field] != first[field]:
                _refuse(
                    f"{field} of rank {state['rank']} is not that of rank {first['rank']}",
                    "load states that all ranks saved at the same step",
                )
        ranks.append(state["rank"])
        if state["world_size"] == mine["world_size"]:
            own = state if state["rank"] == mine["rank"] else own
        else:
            for name, tensor in state["residual"].items():
                part = tensor / state["world_size"]
                owed[name] = owed[name] + part if name in owed else part
    if first is None:
        _refuse("there is none", "pass what state_dict() returned")
    if not mine["residual"]:  # what is left is the same on all ranks
        return first, {}
    if first["world_size"] == mine["world_size"]:
        if own is None:
            _refuse(
                f"it was saved by rank {ranks[0]}, this is rank {mine['rank']}, and residuals are each rank's own",
                f"load this rank's file, like torch.load(f'cgx-{mine['rank']}.pt', weights_only=True)",
            )
        return own, dict(own["residual"])
    if sorted(ranks) != list(range(first["world_size"])):
        _refuse(
            f"it comes from world_size {first['world_size']}, this is world_size {mine['world_size']}, and there are "
            f"only the residuals of ranks {sorted(ranks)}",
            "pass the states of all ranks: handle.load_state_dict(torch.load(f'cgx-{rank}.pt', weights_only=True) "
            f"for rank in range({first['world_size']}))",
        )
    return first, owed


def _check(mine: State, state: State, *, is_auto: bool) -> None:
    if not isinstance(state, Mapping):
        _refuse(f"it is a {type(state).__name__}", "pass what state_dict() returned, or an iterable of those")
    if state.get("version") != _VERSION:
        _refuse(
            f"version here {_VERSION}, in it {state.get('version')}",
            "pass what state_dict() of this version of cgx returned, whole",
        )
    missing = sorted(mine.keys() - state.keys())
    if missing:
        _refuse(f"it lacks {missing}", "pass what state_dict() returned, whole")
    # auto may compress here and not there, or the other way round.
    is_free = is_auto and None in (mine["seed"], state["seed"])
    if not is_free and mine["seed"] != state["seed"]:
        _refuse(
            f"seed here {mine['seed']}, in it {state['seed']} (None where nothing is compressed)",
            f"call cgx.compress as the saved run did, with seed={state['seed']}"
            if state["seed"] is not None
            else "leave out load_state_dict: there is nothing to go on from",
        )
    if bool(mine["residual"]) != bool(state["residual"]):
        _refuse(
            f"residual is {'kept' if mine['residual'] else 'not kept'} here and {'is' if state['residual'] else 'not'} "
            "in it",
            f"pass error_feedback={bool(state['residual'])} to cgx.compress, or leave out load_state_dict",
        )
    for field in ("residual", *(() if is_free else ("reduction_index",))):
        odd = mine[field].keys() ^ state[field].keys()
        if odd:
            _refuse(f"{field} differs in {sorted(odd)[:5]}", "build the same model and plan as the saved run did")
    for name, tensor in mine["residual"].items():
        if tensor.shape != state["residual"][name].shape:
            _refuse(
                f"residual of {name} has shape {list(state['residual'][name].shape)}, the parameter "
                f"{list(tensor.shape)}",
                "build the same model as the saved run did",
            )


def _shares(session: Session, name: str, rank: int) -> NDArray[np.float32]:
    """By element, the factor of the mean residual that keeps the sum of what all ranks owe the averaged gradient.

    A rank's residual enters when the rank encodes. With ``scatter_reduce`` the owner of an element never encodes it
    before the sum, so the other ``W - 1`` ranks carry its part.
    """
    world, numel = session.world_size, torch.Size(session.shapes[name]).numel()
    if session.method.algorithm != "scatter_reduce":
        return np.ones(numel, np.float32)
    segment = Segment(name, session.shapes[name], "fp32", session.plans[session.method.plan][name])
    owners = np.repeat(segment.owners(world), segment.stripe_numel)[:numel]
    return np.where(owners == rank, 0, world / (world - 1)).astype(np.float32)


def _refuse(what: str, remedy: str) -> NoReturn:
    raise SpecError(f"this state does not fit: {what}. Nothing was changed; {remedy}")
