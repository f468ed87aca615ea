"""``cgx.all_reduce(..., "auto")``: for every size class the fastest way, found by timing the calls themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, final

import numpy as np
import torch
import torch.distributed as dist

from cgx.collectives.agreement import agree
from cgx.collectives.base import Op
from cgx.collectives.exact import divide
from cgx.collectives.probe import agree_on_fastest, agree_on_slowest
from cgx.core.algorithm import Algorithm
from cgx.core.plan import OFF
from cgx.policies.race import Candidate, Race
from cgx.torch.advisor import SPECS, Advisor, Load
from cgx.torch.compat import DTYPES
from cgx.torch.session import Session
from cgx.transports.process_group import transport_error

_ROUNDS = 4
_TURN_SECONDS, _TURN_CALLS = 0.05, (3, 25)
_LOOK_CALLS, _LOOK_LAST = 256, 16  # so seldom are calls compared with those at the decision, and so many of them
_DRIFT = 1.5
UNNAMED = "tensor"  # what a tensor is called that came by itself

Reduce = Callable[[Mapping[str, torch.Tensor], Op, str, Algorithm], None]
Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
Alike = tuple[torch.Size, torch.dtype, torch.layout]
Kind = tuple[int, frozenset[torch.dtype]]  # bits that count the bytes, and what they hold


@final
@dataclass(slots=True)
class _SizeClass:
    """What is known of messages of about one size."""

    ways: tuple[tuple[str, Algorithm], ...]
    race: Race
    seconds: list[float] = field(default_factory=list)
    turn_calls: int = _TURN_CALLS[0]
    settled_seconds: float | None = None


@final
class Chooser:
    """Reduces tensors of a group the fastest way it knows.

    Ranks count the same calls and decide at the same ones. On trial they start together, and the slowest rank counts.

    Args:
        session: The group's, idle.
        group: Where exact sums travel, as they would without cgx.
        reduce: Reduces with a spec and an algorithm.
    """

    def __init__(self, session: Session, group: dist.ProcessGroup, reduce: Reduce) -> None:
        self._session, self._group, self._reduce = session, group, reduce
        self._advisor = Advisor(session, SPECS)
        self._classes: dict[Kind, _SizeClass] = {}
        self._agreed: dict[Signature, Kind] = {}
        self._warm: set[tuple[Signature, int]] = set()  # past the call that compiles, connects, pages in and agrees
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
        try:
            self._group.allreduce([tensor]).wait()  # sums, without the 20 microseconds of the function around it
        except RuntimeError as error:
            self._break(error)
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
        signature = tuple([(name, tensor.shape, tensor.dtype) for name, tensor in named.items()])
        known = self._class_of(signature, named)
        way = known.race.current
        spec, algorithm = known.ways[way]
        if not known.race.is_settled:
            self._start_together()
        start = time.perf_counter()
        if spec == OFF:
            self._reduce_exactly(named, op)
        else:
            self._reduce(named, op, spec, algorithm)
        seconds = time.perf_counter() - start
        if (signature, way) not in self._warm:
            self._warm.add((signature, way))
            return
        self._learn(known, seconds)
        if spec == OFF and known.race.is_settled and list(named) == [UNNAMED]:
            (tensor,) = named.values()
            # Complex ones take a view, which the engine's function makes; and a look may have dropped the class.
            if tensor.is_floating_point() and self._classes.get(self._agreed[signature]) is known:
                self._native[tensor.shape, tensor.dtype, tensor.layout] = known

    def choice(self, raw_nbytes: int, dtype: torch.dtype = torch.float32) -> str:
        """What is in use for messages of this size: ``off``, or spec and algorithm, and whether it is on trial."""
        known = self._classes.get((raw_nbytes.bit_length(), frozenset([dtype])))
        if known is None:
            return "not chosen yet"
        spec, algorithm = known.ways[known.race.current]
        name = OFF if spec == OFF else f"{spec} by {algorithm}"
        return name if known.race.is_settled else f"{name}, on trial"

    def _class_of(self, signature: Signature, named: Mapping[str, torch.Tensor]) -> _SizeClass:
        kind = self._agreed.get(signature)
        if kind is None:
            # The engine would add up what does not belong together, or end the process.
            with self._session.exchange():
                agree([str(line) for line in signature], self._session.scatter_lane, about="the tensors to reduce")
            raw_nbytes = sum(tensor.nbytes for tensor in named.values())
            kind = self._agreed[signature] = raw_nbytes.bit_length(), frozenset(dtype for _, _, dtype in signature)
        known = self._classes.get(kind)
        if known is None:
            known = self._classes[kind] = self._open(list(named.values()))
        return known

    def _open(self, tensors: list[torch.Tensor]) -> _SizeClass:
        raw_nbytes = sum(tensor.nbytes for tensor in tensors)
        compressible = [tensor for tensor in tensors if tensor.dtype in DTYPES]
        exact_nbytes = raw_nbytes - sum(tensor.nbytes for tensor in compressible)
        load = Load(sum(tensor.numel() for tensor in compressible), exact_nbytes, raw_nbytes)
        ways: list[tuple[str, Algorithm]] = [(OFF, "scatter_reduce")]
        candidates = [Candidate(OFF, self._advisor.exact(raw_nbytes))]
        for spec in SPECS if compressible else ():
            for algorithm in self._advisor.algorithms:
                ways.append((spec, algorithm))
                seconds = self._advisor.predict(spec, algorithm, load)
                candidates.append(Candidate(f"{spec} by {algorithm}", seconds))
        return _SizeClass(tuple(ways), Race(candidates, rounds=_ROUNDS))

    def _learn(self, known: _SizeClass, seconds: float) -> None:
        known.seconds.append(seconds)
        if known.race.is_settled:
            if len(known.seconds) >= _LOOK_CALLS:
                self._look(known)
        elif len(known.seconds) >= known.turn_calls:
            race, typical_s = known.race, self._agree_on_typical(known.seconds, agree_on_slowest)
            race.record(typical_s)
            known.seconds.clear()
            known.turn_calls = min(max(math.ceil(_TURN_SECONDS / typical_s), _TURN_CALLS[0]), _TURN_CALLS[1])
            if race.is_settled:
                known.settled_seconds = race.settled_seconds

    def _look(self, known: _SizeClass) -> None:
        """Are calls still as fast as when this was decided? If not, and the link is to blame, decide anew."""
        # Here ranks come as they please: who came last timed nothing but the operation.
        typical_s = self._agree_on_typical(known.seconds[-_LOOK_LAST:], agree_on_fastest)
        known.seconds.clear()
        before = known.settled_seconds = known.settled_seconds or typical_s
        if 1 / _DRIFT < typical_s / before < _DRIFT:
            return
        known.settled_seconds = typical_s  # whatever it is then, it is not the link: no glance at every look
        if self._advisor.link_has_changed():
            for kept in (self._classes, self._native, self._warm):
                kept.clear()

    def _start_together(self) -> None:
        """While ways are compared: a way of one step would hide its wire behind the lateness of a rank."""
        with self._session.exchange():
            agree_on_slowest([0.0], self._session.scatter_lane)

    def _agree_on_typical(self, seconds: list[float], agree_on: Callable[..., list[float]]) -> float:
        """The lower quartile: hiccups of 3 ms strike up to half of the calls that take 0.5, of every way alike."""
        with self._session.exchange():
            return float(np.quantile(agree_on(seconds, self._session.scatter_lane), 0.25))

    def _reduce_exactly(self, named: Mapping[str, torch.Tensor], op: Op) -> None:
        for tensor in named.values():
            part = tensor.detach()  # weights are leaves that may not be written otherwise
            flat = part if part.is_contiguous() else part.contiguous()  # the engine looks at memory, not at strides
            if op is Op.AVG:
                divide(flat, self._group.size())
            try:
                dist.all_reduce(flat, group=self._group)
            except RuntimeError as error:
                self._break(error)
            if flat is not part:
                part.copy_(flat)

    def _break(self, error: RuntimeError) -> NoReturn:
        """Tells of a failed sum of the engine's in our words, and ends the session, as its peers are out of step."""
        with self._session.exchange():
            raise transport_error(error, "an exact all-reduce", self._session.timeout_seconds) from error
