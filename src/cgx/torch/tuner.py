"""``how="auto"`` for DDP: tries what is predicted to pay, keeps what does, and looks again when the link changes.

A step is timed from its first bucket to the next step's, so it holds everything that a user waits for, and belongs to
the way its gradients travelled. Ranks count the same steps and decide at the same ones, on numbers they agreed about.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import final

from cgx.core.plan import Parameter, choose_specs
from cgx.core.spec import PhaseSpecs
from cgx.policies.race import Candidate, Race
from cgx.telemetry.summary import Auto
from cgx.torch.advisor import SPECS, Advisor
from cgx.torch.session import Method, Session

_LOG = logging.getLogger("cgx")
OFF = "off"

_HOOK_SECONDS = 2e-4  # what a Python hook costs a step, generously: a gain below it is none
_GAIN = 0.15  # of the exact reduction's time: what must be predicted before a hook is registered
_ROUNDS = 3
_TURN_SECONDS, _TURN_STEPS = 0.4, (3, 25)  # a turn of the race: long enough to see past noise, short enough to follow
_LOOK_STEPS = 16  # between two looks at the step time, for an exchange of 16 bytes
_GLANCE_SECONDS, _GLANCE_STEPS = 4.0, 8  # between two glances at the link
_DRIFT = 1.5  # times the step time at the decision: time to glance at the link


@final
class Tuner:
    """Chooses how the buckets of one DDP model travel, step by step.

    Args:
        session: The model's.
        advisor: Of that session.
        buckets: What to expect of a step, until one was seen.
    """

    def __init__(self, session: Session, advisor: Advisor, buckets: Sequence[tuple[int, int]]) -> None:
        self._session, self._advisor = session, advisor
        self._buckets, self._seen = list(buckets), list[tuple[int, int]]()
        self.history: list[str] = []
        self._step = 0
        self._started_at = self._waited_at_start = 0.0
        self._steps: list[float] = []
        self._waits: list[float] = []
        self.exposed_seconds: dict[str, float] = {}
        self.predicted: dict[str, float] = {}
        self._turn_steps = _TURN_STEPS[0]
        self._skip = 2  # DDP's first step, whose buckets it rebuilds, and the one in which kernels compile
        self._settled_seconds = self._since_glance_seconds = 0.0
        self._start_race()

    @property
    def choice(self) -> str:
        """The candidate in use."""
        return self._names[self._race.current]

    def begin_step(self) -> None:
        """Call at the first bucket of every reduced step, on every rank; may exchange a few bytes and decide.

        Raises:
            TransportError: A peer is lost or silent.
        """
        now = time.perf_counter()
        if self._step:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append(now - self._started_at)
                self._waits.append(self._session.wait_seconds - self._waited_at_start)
            self._buckets = self._seen or self._buckets
        self._seen = []
        self._step += 1
        if self._race.is_settled:
            self._look()
        elif len(self._steps) >= self._turn_steps:
            self._end_turn()
        self._started_at, self._waited_at_start = time.perf_counter(), self._session.wait_seconds

    def method(self, *, numel: int, raw_nbytes: int) -> Method | None:
        """How the next bucket travels; None is the engine's own all-reduce."""
        self._seen.append((numel, raw_nbytes))
        if self.choice == OFF:
            return None
        return self._advisor.best(self.choice, numel=numel, raw_nbytes=raw_nbytes).method

    def _predict(self) -> dict[str, float]:
        """Seconds on link and codec of a step's buckets when nothing overlaps with them, by candidate."""
        seconds = {OFF: sum(self._advisor.exact(raw) for _, raw in self._buckets)}
        for plan in self._advisor.plans:
            seconds[plan] = sum(self._advisor.best(plan, numel=n, raw_nbytes=raw).seconds for n, raw in self._buckets)
        return seconds

    def _start_race(self) -> None:
        self.predicted = self._predict()
        self._names = (OFF, *self._advisor.plans)
        floors = {OFF: self._advisor.exact_floor(sum(raw for _, raw in self._buckets))}
        candidates = [Candidate(name, self.predicted[name], floors.get(name, 0.0)) for name in self._names]
        # All of them are plausible: how much of a reduction hides behind the backward pass, only a trial tells.
        self._race = Race(candidates, rounds=_ROUNDS, plausible=math.inf)
        self.exposed_seconds = {}
        self._clear()
        expected = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.predicted.items())
        action = f"trying {self.choice}" if self.is_worth_a_hook else "leaving the model alone"
        self._say(f"{action}; predicted on link and codec: {expected} ({self._advisor})")

    def _end_turn(self) -> None:
        before = self.choice
        step_s, exposed_s = self._agreed()
        self.exposed_seconds[before] = exposed_s
        self._race.record(step_s)
        self._turn_steps = min(max(math.ceil(_TURN_SECONDS / step_s), _TURN_STEPS[0]), _TURN_STEPS[1])
        self._clear()
        self._skip = int(self.choice != before)
        if self._race.is_settled:
            self._settled_seconds = self._race.seconds.get(self.choice, step_s)
            self._since_glance_seconds = 0.0
            self._say(self.reason)

    def _look(self) -> None:
        """Every few steps: has the step time drifted, or is it time to glance at the link?"""
        count = len(self._steps)
        if count < (_GLANCE_STEPS if count * self._settled_seconds > _GLANCE_SECONDS / 2 else _LOOK_STEPS):
            return
        step_s, exposed_s = self._agreed()
        self._since_glance_seconds += count * step_s
        self.exposed_seconds[self.choice] = exposed_s
        self._clear()
        has_drifted = not 1 / _DRIFT < step_s / self._settled_seconds < _DRIFT
        if not has_drifted and self._since_glance_seconds < _GLANCE_SECONDS:
            return
        if self._advisor.link_has_changed():
            self._start_race()
        elif has_drifted:
            self._settled_seconds = step_s
        self._since_glance_seconds = 0.0
        self._skip = 1

    def _agreed(self) -> list[float]:
        """Medians of step time and of what of it was exposed; the slowest rank's."""
        return self._advisor.agree([statistics.median(self._steps), statistics.median(self._waits)])

    def _clear(self) -> None:
        self._steps.clear()
        self._waits.clear()

    @property
    def reason(self) -> str:
        """One line: what was chosen, and the numbers it was chosen by."""
        tried = ", ".join(f"{name} {seconds * 1e3:.3g} ms a step" for name, seconds in self._race.seconds.items())
        untried = [name for name in self._names if name not in self._race.seconds]
        ruled_out = f"; {', '.join(untried)} cannot be faster" if untried else ""
        return f"{self.choice}: {tried}{ruled_out} ({self._advisor})"

    def _say(self, what: str) -> None:
        self.history.append(f"step {self._step}: {what}")
        if self._session.scatter_lane.rank == 0:
            _LOG.info("auto, %s", self.history[-1])

    @property
    def is_worth_a_hook(self) -> bool:
        """Whether the predicted gain outweighs a Python hook, which DDP cannot drop once it is registered."""
        gain = self.predicted[OFF] - min(self.predicted.values())
        return gain > _HOOK_SECONDS + _GAIN * self.predicted[OFF]

    def report(self) -> Auto:
        """What was chosen, by which numbers, and how it came to that."""
        measured = self._race.seconds
        return Auto(
            choice=self.choice if self.is_worth_a_hook or measured else OFF,
            is_settled=self._race.is_settled or not self.is_worth_a_hook,
            predicted_seconds=dict(self.predicted),
            step_seconds=measured,
            exposed_seconds=dict(self.exposed_seconds),
            history=tuple(self.history),
        )


def auto_plans(parameters: Sequence[Parameter]) -> dict[str, dict[str, PhaseSpecs]]:
    """The plans that ``auto`` chooses from, by name."""
    return {name: choose_specs(name, parameters) for name in (*SPECS, OFF)}
