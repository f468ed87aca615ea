"""``cgx.all_reduce(..., "auto")``: for every size class the fastest way, found by timing the calls themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
import torch.distributed as dist

from cgx.collectives.agreement import agree
from cgx.collectives.base import Op
from cgx.collectives.exact import divide
from cgx.collectives.probe import agree_on_fastest
from cgx.core.algorithm import Algorithm
from cgx.core.plan import OFF
from cgx.policies.race import Candidate, Race
from cgx.torch.advisor import SPECS, Advisor, Load
from cgx.torch.session import Session

_ROUNDS = 4
_TURN_SECONDS, _TURN_CALLS = 0.05, (3, 25)
_LOOK_CALLS, _LOOK_LAST = 256, 16  # so seldom are calls compared with those at the decision, and so many of them
_DRIFT = 1.5
UNNAMED = "tensor"  # what a tensor is called that came by itself

Reduce = Callable[[Mapping[str, torch.Tensor], Op, str, Algorithm], None]
Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
Alike = tuple[torch.Size, torch.dtype, torch.layout]


@final
@dataclass(slots=True)
class _SizeClass:
    """What is known of messages of about one size."""

    ways: tuple[tuple[str, Algorithm], ...]
    race: Race
    seconds: list[float] = field(default_factory=list)
    turn_calls: int = _TURN_CALLS[0]
    skip: int = 1  # calls that compile, connect or page in
    settled_seconds: float | None = None


@final
class Chooser:
    """Reduces tensors of a group the fastest way it knows.

    Ranks count the same calls and decide at the same ones. A call's time is that of the rank that came last to it.

    Args:
        session: The group's, idle.
        group: Where exact sums travel, as they would without cgx.
        reduce: Reduces with a spec and an algorithm.
    """

    def __init__(self, session: Session, group: dist.ProcessGroup, reduce: Reduce) -> None:
        self._session, self._group, self._reduce = session, group, reduce
        self._advisor = Advisor(session, SPECS)
        self._classes: dict[int, _SizeClass] = {}
        self._agreed: dict[Signature, int] = {}
        self._native: dict[Alike, _SizeClass] = {}  # tensors by themselves that are known to travel exact

    def reduce_natively(self, tensor: torch.Tensor, op: Op) -> bool:
        """Reduces a tensor of which it is settled that the engine does it best; False, and nothing done, for others.

        Cost: a few microseconds beside the engine's call. All else that ``reduce`` does took 60 of the 500 that a small
        message needs: Python that runs once in a while is never in a cache.
        """
        known = self._native.get((tensor.shape, tensor.dtype, tensor.layout))
        if known is None or tensor.requires_grad or not (tensor.is_cpu and tensor.is_contiguous()):
            return False
        start = time.perf_counter()
        if op is Op.AVG:
            divide(tensor, self._group.size())
        self._group.allreduce([tensor]).wait()  # sums, without the 20 microseconds of the function around it
        known.seconds.append(time.perf_counter() - start)
        if len(known.seconds) >= _LOOK_CALLS:
            self._look(known)
        return True

    def reduce(self, named: Mapping[str, torch.Tensor], op: Op) -> None:
        """Reduces in place and waits.

        Raises:
            PlanMismatchError: Ranks gave different names, shapes or dtypes the first time this rank gave these.
            TransportError: A peer is lost or silent.
        """
        known = self._class_of(named)
        spec, algorithm = known.ways[known.race.current]
        start = time.perf_counter()
        if spec == OFF:
            self._reduce_exactly(named, op)
        else:
            self._reduce(named, op, spec, algorithm)
        self._learn(known, time.perf_counter() - start)
        if spec == OFF and known.race.is_settled and not known.skip and list(named) == [UNNAMED]:
            (tensor,) = named.values()
            if tensor.is_floating_point():  # complex ones take a view, which the engine's function makes
                self._native[tensor.shape, tensor.dtype, tensor.layout] = known

    def choice(self, raw_nbytes: int) -> str:
        """What is in use for messages of this size: ``off``, or spec and algorithm, and whether it is on trial."""
        known = self._classes.get(raw_nbytes.bit_length())
        if known is None:
            return "not chosen yet"
        spec, algorithm = known.ways[known.race.current]
        name = OFF if spec == OFF else f"{spec} by {algorithm}"
        return name if known.race.is_settled else f"{name}, on trial"

    def _class_of(self, named: Mapping[str, torch.Tensor]) -> _SizeClass:
        signature = tuple([(name, tensor.shape, tensor.dtype) for name, tensor in named.items()])
        raw_nbytes = self._agreed.get(signature)
        if raw_nbytes is None:
            # The engine would add up what does not belong together, or end the process.
            with self._session.exchange():
                agree([str(line) for line in signature], self._session.scatter_lane, about="the tensors to reduce")
            raw_nbytes = self._agreed[signature] = sum(tensor.nbytes for tensor in named.values())
        known = self._classes.get(raw_nbytes.bit_length())
        if known is None:
            known = self._classes[raw_nbytes.bit_length()] = self._open(raw_nbytes)
        return known

    def _open(self, raw_nbytes: int) -> _SizeClass:
        load = Load(raw_nbytes // 4, 0, raw_nbytes)
        ways: list[tuple[str, Algorithm]] = [(OFF, "scatter_reduce")]
        candidates = [Candidate(OFF, self._advisor.exact(raw_nbytes))]
        for spec in SPECS:
            for algorithm in self._advisor.algorithms:
                ways.append((spec, algorithm))
                seconds = self._advisor.predict(spec, algorithm, load)
                candidates.append(Candidate(f"{spec} by {algorithm}", seconds))
        return _SizeClass(tuple(ways), Race(candidates, rounds=_ROUNDS))

    def _learn(self, known: _SizeClass, seconds: float) -> None:
        if known.skip:
            known.skip -= 1
            return
        known.seconds.append(seconds)
        if known.race.is_settled:
            if len(known.seconds) >= _LOOK_CALLS:
                self._look(known)
        elif len(known.seconds) >= known.turn_calls:
            race, typical_s = known.race, self._agree_on_typical(known.seconds)
            before = race.current
            race.record(typical_s)
            known.seconds.clear()
            known.turn_calls = min(max(math.ceil(_TURN_SECONDS / typical_s), _TURN_CALLS[0]), _TURN_CALLS[1])
            known.skip = int(race.current != before)

    def _look(self, known: _SizeClass) -> None:
        """Are calls still as fast as when this was decided? If not, and the link is to blame, decide anew."""
        typical_s = self._agree_on_typical(known.seconds[-_LOOK_LAST:])
        known.seconds.clear()
        before, known.settled_seconds = known.settled_seconds or typical_s, typical_s
        if not 1 / _DRIFT < typical_s / before < _DRIFT and self._advisor.link_has_changed():
            self._classes.clear()
            self._native.clear()

    def _agree_on_typical(self, seconds: list[float]) -> float:
        """The lower quartile: hiccups of 3 ms strike up to half of the calls that take 0.5, of every way alike."""
        with self._session.exchange():
            return float(np.quantile(agree_on_fastest(seconds, self._session.scatter_lane), 0.25))

    def _reduce_exactly(self, named: Mapping[str, torch.Tensor], op: Op) -> None:
        for tensor in named.values():
            part = tensor.detach()  # weights are leaves that may not be written otherwise
            flat = part if part.is_contiguous() else part.contiguous()  # the engine looks at memory, not at strides
            if op is Op.AVG:
                divide(flat, self._group.size())
            dist.all_reduce(flat, group=self._group)
            if flat is not part:
                part.copy_(flat)
