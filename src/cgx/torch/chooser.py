"""``cgx.all_reduce(..., "auto")``: for every size class the fastest way, found by timing the calls themselves."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist

from cgx.collectives.base import Op
from cgx.collectives.exact import divide
from cgx.collectives.probe import agree_on_fastest
from cgx.core.algorithm import Algorithm
from cgx.policies.race import Candidate, Race
from cgx.torch.advisor import SPECS, Advisor
from cgx.torch.session import Session

OFF = "off"
_ROUNDS = 4
_TURN_SECONDS, _TURN_CALLS = 0.05, (3, 10)
_LOOK_CALLS, _LOOK_LAST = 256, 16  # so seldom are calls compared with those at the decision, and so many of them
_DRIFT = 1.5

Reduce = Callable[[Mapping[str, torch.Tensor], Op, str, Algorithm], None]


@final
@dataclass(slots=True)
class _SizeClass:
    """What is known of messages of about one size."""

    ways: tuple[tuple[str, Algorithm], ...]
    race: Race
    seconds: list[float] = field(default_factory=list)
    turn_calls: int = _TURN_CALLS[0]
    skip: int = 1  # calls that compile, connect or page in
    settled_seconds: float = 0.0


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
        self._classes: dict[tuple[int, int], _SizeClass] = {}

    def reduce(self, named: Mapping[str, torch.Tensor], op: Op) -> None:
        """Reduces in place and waits."""
        raw_nbytes = sum(tensor.nbytes for tensor in named.values())
        key = (raw_nbytes.bit_length(), len(named))
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = self._open(raw_nbytes)
        spec, algorithm = known.ways[known.race.current]
        start = time.perf_counter()
        if spec == OFF:
            self._reduce_exactly(named, op)
        else:
            self._reduce(named, op, spec, algorithm)
        self._learn(known, time.perf_counter() - start, raw_nbytes)

    def choice(self, raw_nbytes: int, tensors: int = 1) -> str:
        """What is in use for messages of this size: ``off``, or spec and algorithm, and whether it is on trial."""
        known = self._classes.get((raw_nbytes.bit_length(), tensors))
        if known is None:
            return "not chosen yet"
        spec, algorithm = known.ways[known.race.current]
        name = OFF if spec == OFF else f"{spec} by {algorithm}"
        return name if known.race.is_settled else f"{name}, on trial"

    def _open(self, raw_nbytes: int) -> _SizeClass:
        advisor, numel = self._advisor, raw_nbytes // 4
        ways: list[tuple[str, Algorithm]] = [(OFF, "scatter_reduce")]
        candidates = [Candidate(OFF, advisor.exact(raw_nbytes))]
        for spec in SPECS:
            for algorithm in advisor.algorithms:
                ways.append((spec, algorithm))
                seconds = advisor.predict(spec, algorithm, numel=numel, raw_nbytes=raw_nbytes)
                candidates.append(Candidate(f"{spec} by {algorithm}", seconds))
        return _SizeClass(tuple(ways), Race(candidates, rounds=_ROUNDS))

    def _learn(self, known: _SizeClass, seconds: float, raw_nbytes: int) -> None:
        if known.skip:
            known.skip -= 1
            return
        known.seconds.append(seconds)
        if known.race.is_settled:
            if len(known.seconds) >= _LOOK_CALLS:
                self._look(known, raw_nbytes)
            return
        if len(known.seconds) < known.turn_calls:
            return
        race, median_s = known.race, self._agreed(known.seconds)
        before = race.current
        race.record(median_s)
        known.seconds.clear()
        known.turn_calls = min(max(math.ceil(_TURN_SECONDS / median_s), _TURN_CALLS[0]), _TURN_CALLS[1])
        known.skip = int(race.current != before)
        known.settled_seconds = min(race.seconds.values())

    def _look(self, known: _SizeClass, raw_nbytes: int) -> None:
        """Are calls still as fast as when this was decided? If not, and the link is to blame, decide anew."""
        median_s = self._agreed(known.seconds[-_LOOK_LAST:])
        known.seconds.clear()
        if 1 / _DRIFT < median_s / known.settled_seconds < _DRIFT:
            return
        known.settled_seconds = median_s
        if self._advisor.link_has_changed():
            self._classes = {key: entry for key, entry in self._classes.items() if entry is not known}

    def _agreed(self, seconds: list[float]) -> float:
        return statistics.median(agree_on_fastest(seconds, self._session.scatter_lane))

    def _reduce_exactly(self, named: Mapping[str, torch.Tensor], op: Op) -> None:
        works: list[Any] = []
        for tensor in named.values():
            part = tensor.detach()
            if op is Op.AVG:
                divide(part, self._group.size())
            works.append(dist.all_reduce(part, group=self._group, async_op=len(named) > 1))
        for work in works:
            if work is not None:
                work.wait()
