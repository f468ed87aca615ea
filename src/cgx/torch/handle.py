"""The handle of a compressed model: its report, its state, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cgx.core.plan import OFF
from cgx.errors import SpecError
from cgx.telemetry.summary import Report, count_specs
from cgx.torch.advisor import Load, load_of
from cgx.torch.session import Session
from cgx.torch.tuner import Tuner


class Door(Protocol):
    """What buckets come through: its handle may come and go."""

    group: dist.ProcessGroup
    handle: Handle | None


@final
class Handle:
    """What ``cgx.compress`` returns: the report, the state and the way back.

    Args:
        session: None when nothing is compressed.
        names: Of the model's parameters, by id.
        door: Through which buckets come.
        tuner: Of ``auto``.
    """

    def __init__(
        self, session: Session | None, names: Mapping[int, str], door: Door, tuner: Tuner | None = None
    ) -> None:
        self.session, self._names, self._door, self.tuner = session, names, door, tuner
        self._loads: dict[tuple[str, ...], Load] = {}

    def report(self) -> Report:
        """Totals of this rank so far (zeros when nothing is compressed); ``print(handle.report())`` shows a table."""
        auto = None if self.tuner is None else self.tuner.report()
        if self.session is None:
            return Report(self._door.group.size(), 0, 0, 0, 0, 0.0, {OFF: len(self._names)}, None, auto)
        specs = self.session.plans[self.session.method.plan if auto is None else auto.choice]
        plan = count_specs({name: specs[name] for name in self._names.values()})
        return replace(self.session.report(), auto=auto, plan=plan)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: reduction counters and, with error feedback, residuals; loads with ``weights_only=True``.

        Local, not collective: save one file per rank. Load it on the same rank of a group of the same size.
        """
        session = self.session
        state: dict[str, Any] = {"version": 1, "world_size": self._door.group.size(), "residual": {}}
        if session is None:
            return state | {"seed": None, "reduction_index": {}}
        counted = dict(zip(session.shapes, session.reduction_index.tolist(), strict=True))
        indices = {name: counted[name] for name in self._names.values()}
        state |= {"seed": session.seed, "reduction_index": indices}
        if session.residual is not None:
            for name, at in session.state_offsets.items():
                shape = session.shapes[name]
                flat = torch.from_numpy(session.residual)[at : at + _numel(shape)]
                state["residual"][name] = flat.view(shape).clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was taken, bit for bit.

        Under ``auto`` counters continue, while what is chosen is tried anew: a state taken on another link fits too.

        Raises:
            SpecError: The state is of another model, seed, world size or residual setting; nothing is changed.
        """
        mine = self.state_dict()
        # auto may compress here and not there, or the other way round.
        is_free = self.tuner is not None and None in (mine["seed"], state.get("seed"))
        for field in ("version", "world_size", *(() if is_free else ("seed",))):
            if mine[field] != state.get(field):
                raise SpecError(f"this state does not fit: {field} here {mine[field]}, in it {state.get(field)}")
        for field in ("residual", *(() if is_free else ("reduction_index",))):
            ours, theirs = set(mine[field]), set(state.get(field, {}))
            if ours != theirs:
                raise SpecError(f"this state does not fit: {field} differs in {sorted(ours ^ theirs)[:5]}")
        for name, tensor in mine["residual"].items():
            if tensor.shape != state["residual"][name].shape:
                raise SpecError(
                    f"this state does not fit: residual of {name} has shape {list(state['residual'][name].shape)}, "
                    f"the parameter {list(tensor.shape)}"
                )
        session = self.session
        if session is None:
            return
        for at, name in enumerate(session.shapes):
            session.reduction_index[at] = state["reduction_index"].get(name, session.reduction_index[at])
        if session.residual is not None:
            for name, at in session.state_offsets.items():
                flat = state["residual"][name].reshape(-1)
                session.residual[at : at + len(flat)] = flat.numpy()

    def parameters(self, bucket: GradBucket) -> tuple[list[str], list[tuple[int, ...]]]:
        """Names and shapes of a bucket's parameters."""
        names = []
        for parameter in bucket.parameters():
            name = self._names.get(id(parameter))
            if name is None:
                raise SpecError(
                    f"DDP reduces a parameter of shape {tuple(parameter.shape)} that the model did not have when "
                    "cgx.compress was called; call cgx.compress after the model is complete"
                )
            names.append(name)
        # Flat shapes in buffer order: strides differ under channels_last, memory order does not.
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        return names, shapes

    def load(self, names: tuple[str, ...], raw_nbytes: int) -> Load:
        """What the bucket of these parameters has to move."""
        if names not in self._loads:
            assert self.session is not None
            self._loads[names] = load_of(self.session, names, raw_nbytes)
        return self._loads[names]

    def remove(self) -> None:
        """Back to exact gradients: the hook stays (DDP cannot drop one) and all-reduces as stock DDP does."""
        session, self.session = self.session, None
        if self._door.handle is self:
            self._door.handle = None
        if session is not None:
            session.close()


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
