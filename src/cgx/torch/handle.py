"""The handle of a compressed model: its report, its state, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from cgx.torch.state import load_state, saved_state
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
        self._counts: dict[str, Mapping[str, int]] = {}
        self._last: Report | None = None

    def report(self) -> Report:
        """Totals of this rank so far (zeros when nothing is compressed); ``print(handle.report())`` shows a table.

        After ``remove`` they are what they were then.
        """
        if self._last is not None:
            return self._last
        auto = None if self.tuner is None else self.tuner.report()
        if self.session is None:
            return Report(self._door.group.size(), 0, 0, 0, 0, 0.0, {OFF: len(self._names)}, None, auto)
        plan = self.session.method.plan if auto is None else auto.choice
        if plan not in self._counts:
            specs = self.session.plans[plan]
            self._counts[plan] = count_specs({name: specs[name] for name in self._names.values()})
        return replace(self.session.report(), auto=auto, plan=self._counts[plan])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plan, reduction counters, residuals (fp32) and what ``auto`` decided.

        Local, never collective: save one file a rank beside the checkpoint, on every rank. Loads with
        ``weights_only=True``; in a distributed checkpoint, give each rank's state a key of its own. Without error
        feedback all ranks' states say the same, so rank 0's will do for all.

        Example:
            ``torch.save(handle.state_dict(), f"cgx-{dist.get_rank()}.pt")``
        """
        group = self._door.group
        return saved_state(
            self.session, self._names.values(), rank=group.rank(), world_size=group.size(), tuner=self.tuner
        )

    def load_state_dict(self, state: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Continues where ``state_dict`` was taken: bit for bit, if the plan and the number of ranks are the same.

        Local; call it on every rank with states of the same step, else the next reduction raises PlanMismatchError.

        With another number of ranks and error feedback, pass the states of all saved ranks (a generator holds two at a
        time): the mean of their residuals is handed out so that the averaged gradient still gets all that is owed,
        rounding apart. Under ``auto`` a settled choice is kept if the link measures as it did then, within a
        factor of 1.6, and the number of ranks is the same; otherwise it is tried anew.

        Raises:
            SpecError: The state is of another model, seed, rank or residual setting; nothing is changed.

        Example:
            ``handle.load_state_dict(torch.load(f"cgx-{dist.get_rank()}.pt", weights_only=True))``, and from four ranks
            ``handle.load_state_dict(torch.load(f"cgx-{rank}.pt", weights_only=True) for rank in range(4))``
        """
        load_state(self.session, self.state_dict(), state, self.tuner)

    def parameters(self, bucket: GradBucket) -> tuple[list[str], list[tuple[int, ...]]]:
        """Names and shapes of a bucket's parameters."""
        names = [self.name(parameter) for parameter in bucket.parameters()]
        # Flat shapes in buffer order: strides differ under channels_last, memory order does not.
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        return names, shapes

    def name(self, parameter: torch.Tensor) -> str:
        """Name of one of the model's parameters."""
        name = self._names.get(id(parameter))
        if name is None:
            raise SpecError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that the model did not have when "
                "cgx.compress was called; call cgx.compress after the model is complete"
            )
        return name

    def load(self, names: tuple[str, ...], raw_nbytes: int) -> Load:
        """What the bucket of these parameters has to move."""
        if names not in self._loads:
            assert self.session is not None
            self._loads[names] = load_of(self.session, names, raw_nbytes)
        return self._loads[names]

    def remove(self) -> None:
        """Back to exact gradients: the hook stays (DDP cannot drop one) and all-reduces as stock DDP does."""
        self._last = self.report()
        session, self.session = self.session, None
        if self._door.handle is self:
            self._door.handle = None
        if session is not None:
            session.close()
