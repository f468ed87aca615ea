"""``how="auto"`` for DDP: tries what is predicted to pay, keeps what does, and looks again when the link changes.

A step is timed from its first bucket to the next step's, so it holds everything that a user waits for, and belongs to
the way its gradients travelled. Ranks count the same steps and decide at the same ones, on numbers they agreed about.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from cgx.core.plan import OFF, Parameter, choose_specs, fingerprint
from cgx.core.spec import PhaseSpecs
from cgx.errors import PlanMismatchError
from cgx.policies.race import Candidate, Race
from cgx.policies.step import Bucket, exposed_seconds
from cgx.telemetry.summary import Auto
from cgx.torch.advisor import SPECS, Advisor, Load
from cgx.torch.method import Method
from cgx.torch.session import Session

_LOG = logging.getLogger("cgx")

_HOOK_SECONDS = 2e-4  # what a Python hook costs a step, generously: a gain below it is none
_PASS_BYTE_S = 1.2e-10  # of the pass over the gradient that DDP saves without a hook: it divides while it copies
_UNNOTICED = 0.02  # of a step
_DOUBT = 2.0  # so many times longer than predicted may compression take, for instance where ranks share cores
_ROUNDS = 3
_TURN_SECONDS, _TURN_STEPS = 0.4, (3, 25)  # a turn of the race: long enough to see past noise, short enough to follow
_LOOK_STEPS = 16  # between two looks at the step time, for an exchange of 16 bytes
_GLANCE_SECONDS, _GLANCE_STEPS = 4.0, 8  # between two glances at the link
_SAME_LINK = 1.6  # times slower or faster: a saved choice still holds
_DRIFT = 1.5  # times the step time at the decision: time to glance at the link


@final
class Tuner:
    """Chooses how the buckets of one DDP model travel, step by step.

    Making one is collective.

    Args:
        session: The model's, idle.
        advisor: Of that session.
        loads: Buckets to expect of a step, until one was seen.

    Attributes:
        is_worth_a_hook: Whether the predicted gain outweighs a Python hook, which DDP cannot drop once it is there.
        history: Every decision in a line.
    """

    def __init__(self, session: Session, advisor: Advisor, loads: Sequence[Load]) -> None:
        self._session, self._advisor, self._names = session, advisor, (OFF, *advisor.plans)
        self._loads, self._seen = list(loads), list[tuple[Load, float]]()
        self.history: list[str] = []
        self._step = 0
        self._started_at = self._waited_at_start = 0.0
        self._steps: list[float] = []
        self._waits: list[float] = []
        self._turn_steps = _TURN_STEPS[0]
        self._skip = 2  # DDP's first step, whose buckets it rebuilds, and the one in which kernels compile
        self._settled_seconds = self._since_glance_seconds = 0.0
        self._loaded: Mapping[str, Any] | None = None
        self._is_loaded_everywhere = False
        self._expected_seconds = self._on_link()
        is_modelled = session.throttle_bit_s is not None  # then exact sums need the hook as well
        self.is_worth_a_hook = is_modelled or self._is_surely_faster()
        self._start_race()

    @property
    def choice(self) -> str:
        """The candidate in use."""
        return self._names[self._race.current]

    def begin_step(self) -> None:
        """Call at the first bucket of every reduced step, on every rank; may exchange a few bytes and decide.

        Raises:
            TransportError: A peer is lost or silent.
            PlanMismatchError: Ranks loaded different states.
        """
        now = time.perf_counter()
        if self._step:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append(now - self._started_at)
                self._waits.append(self._session.wait_seconds - self._waited_at_start)
            self._loads = [load for load, _ in self._seen] or self._loads
        else:
            self._agree()  # so that what was loaded holds from the first step
        self._step += 1
        if self._race.is_settled:
            self._look()
        elif len(self._steps) >= self._turn_steps:
            self._end_turn()
        if self._is_loaded_everywhere:
            self._take_over()
        self._seen = []
        self._started_at, self._waited_at_start = time.perf_counter(), self._session.wait_seconds

    def method(self, load: Load) -> Method | None:
        """How the next bucket travels; None is the engine's own all-reduce."""
        self._seen.append((load, time.perf_counter() - self._started_at))
        return None if self.choice == OFF else self._advisor.best(self.choice, load).method

    def report(self) -> Auto:
        """What was chosen, by which numbers, and how it came to that."""
        return Auto(
            choice=self.choice if self.is_worth_a_hook else OFF,
            is_settled=self._race.is_settled or not self.is_worth_a_hook,
            link=str(self._advisor),
            expected_seconds=dict(self._expected_seconds),
            step_seconds=self._race.seconds,
            expected_wait_seconds=dict(self._expected_waits),
            wait_seconds=dict(self._measured_waits),
            history=tuple(self.history),
        )

    def state_dict(self) -> dict[str, Any]:
        """What was decided, by which step times and on which link: the same on every rank. Seconds of 0: not tried."""
        seconds = self._race.seconds
        return {
            "step": self._step,
            "choice": self.choice,
            "is_settled": self._race.is_settled and self.is_worth_a_hook,
            "settled_seconds": self._settled_seconds,
            "step_seconds": {name: seconds.get(name, 0.0) for name in self._names},
            "link_byte_s": self._advisor.measured.flat.byte_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes effect when ranks exchange something next: before the first step, at the end of a turn, or at a look.

        Only there do they know that all of them loaded the same.
        """
        self._loaded = dict(state)

    def _is_surely_faster(self) -> bool:
        """Asked twice, with a second probe between: what one hiccup of the machine decides stays for the whole run."""
        if not self._is_promising():
            return False
        self._advisor.probe()
        self._expected_seconds = self._on_link()
        return self._is_promising()

    def _is_promising(self) -> bool:
        return self._sure_gain() > _HOOK_SECONDS or self._risks_little()

    def _risks_little(self) -> bool:
        """Whether a trial that loses costs next to nothing, on a link far slower than compression needs.

        If stock DDP hides the link behind its backward pass, that pass outlasts the link's work: a hook that ends up
        doing exact sums costs a small part of it.
        """
        raw_nbytes = sum(load.raw_nbytes for load in self._loads)
        best_s = min(self._expected_seconds[plan] for plan in self._advisor.plans)
        hook_s = _HOOK_SECONDS + _PASS_BYTE_S * raw_nbytes
        wait_s = sum(self._advisor.exact_wait(load.raw_nbytes) for load in self._loads)
        return _DOUBT * best_s < wait_s and hook_s < _UNNOTICED * self._expected_seconds[OFF]

    def _sure_gain(self) -> float:
        """Seconds that the best plan gains even if stock DDP hides all but the last bucket behind the backward pass.

        Only time in which the processor waits for the link can be won back, and the codec hides behind nothing: it
        takes the processor from the model.
        """
        *hidden, last = self._loads
        cost_s = min(
            self._seconds(plan, last) + sum(self._advisor.processor_seconds(plan, load) for load in hidden)
            for plan in self._advisor.plans
        )
        return self._advisor.exact_wait(last.raw_nbytes) - _DOUBT * cost_s

    def _seconds(self, name: str, load: Load) -> float:
        return self._advisor.exact(load.raw_nbytes) if name == OFF else self._advisor.best(name, load).seconds

    def _on_link(self) -> dict[str, float]:
        """Seconds on link and codec of a step's buckets when nothing overlaps with them, by candidate."""
        return {name: sum(self._seconds(name, load) for load in self._loads) for name in self._names}

    def _start_race(self) -> None:
        self._expected_seconds = expected = self._on_link()
        floors = {OFF: self._advisor.exact_floor(sum(load.raw_nbytes for load in self._loads))}
        candidates = [Candidate(name, expected[name], floors.get(name, 0.0)) for name in self._names]
        # All of them are plausible: how much of a reduction hides behind the backward pass, only a trial tells.
        self._race = Race(candidates, rounds=_ROUNDS, plausible=math.inf)
        self._expected_waits: dict[str, float] = {}
        self._measured_waits: dict[str, float] = {}
        self._turn_steps = _TURN_STEPS[0]
        self._clear()
        told = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in expected.items())
        action = f"trying {self.choice}" if self.is_worth_a_hook else "leaving the model alone"
        self._say(f"{action}; predicted on link and codec: {told} ({self._advisor})")

    def _end_turn(self) -> None:
        before, step_s = self.choice, self._agree_on_medians()
        self._race.record(step_s)
        self._turn_steps = min(max(math.ceil(_TURN_SECONDS / step_s), _TURN_STEPS[0]), _TURN_STEPS[1])
        self._skip = int(self.choice != before)
        if self._race.is_settled:
            self._settled_seconds = self._race.seconds.get(self.choice, step_s)
            self._since_glance_seconds = 0.0
            self._say(self._reason)

    def _look(self) -> None:
        """Every few steps: has the step time drifted, or is it time to glance at the link?"""
        count = len(self._steps)
        if count < (_GLANCE_STEPS if count * self._settled_seconds > _GLANCE_SECONDS / 2 else _LOOK_STEPS):
            return
        step_s = self._agree_on_medians()
        self._since_glance_seconds += count * step_s
        has_drifted = not 1 / _DRIFT < step_s / self._settled_seconds < _DRIFT
        if not has_drifted and self._since_glance_seconds < _GLANCE_SECONDS:
            return
        if self._advisor.link_has_changed():
            self._start_race()
        elif has_drifted:
            self._settled_seconds = step_s
        self._since_glance_seconds = 0.0
        self._skip = 1

    def _agree_on_medians(self) -> float:
        """The slowest rank's step time; also notes what of it was waiting, beside what was predicted."""
        step_s, wait_s = self._agree(statistics.median(self._steps), statistics.median(self._waits))
        self._measured_waits[self.choice] = wait_s
        ready = [Bucket(ready_s, self._seconds(self.choice, load)) for load, ready_s in self._seen]
        if ready:
            self._expected_waits[self.choice] = exposed_seconds(ready[-1].ready_s, ready)
        self._clear()
        return step_s

    def _agree(self, *seconds: float) -> list[float]:
        """The slowest rank's values; the same exchange tells whether all ranks loaded the same state."""
        mark = 0.0
        if self._loaded is not None:
            text = json.dumps(self._loaded, sort_keys=True)
            mark = float(int.from_bytes(fingerprint([text])[:6], "little"))  # a float64 holds 53 bits
        *slowest, most, negated_least = self._advisor.agree([*seconds, mark, -mark])
        if most != -negated_least:
            with self._session.exchange():
                raise PlanMismatchError(
                    "ranks loaded different states (or only some ranks loaded one), so they would choose differently "
                    "under auto; call handle.load_state_dict on every rank, with states saved at the same step"
                )
        self._is_loaded_everywhere = mark > 0
        return slowest

    def _take_over(self) -> None:
        """Goes on from the loaded decision, if the link is as it was then."""
        loaded, self._loaded, self._is_loaded_everywhere = self._loaded, None, False
        assert loaded is not None
        self._step = loaded["step"] + 1
        if not loaded["is_settled"] or loaded["choice"] not in self._names:
            return
        if not 1 / _SAME_LINK < self._advisor.measured.flat.byte_s / loaded["link_byte_s"] < _SAME_LINK:
            self._say(f"the link is not as it was when the state was saved, trying anew ({self._advisor})")
            return
        self._race.settle(loaded["choice"], {name: s for name, s in loaded["step_seconds"].items() if s})
        self._settled_seconds, self._since_glance_seconds = loaded["settled_seconds"], 0.0
        self._skip = max(self._skip, 1)
        self._clear()
        self._say(f"as saved, {self._reason}")

    def _clear(self) -> None:
        self._steps.clear()
        self._waits.clear()

    @property
    def _reason(self) -> str:
        """One line: what was chosen, and the numbers it was chosen by."""
        tried = ", ".join(f"{name} {seconds * 1e3:.3g} ms a step" for name, seconds in self._race.seconds.items())
        untried = [name for name in self._names if name not in self._race.seconds]
        ruled_out = f"; {', '.join(untried)} cannot be faster" if untried else ""
        return f"{self.choice}: {tried}{ruled_out} ({self._advisor})"

    def _say(self, what: str) -> None:
        self.history.append(f"step {self._step}: {what}")
        if self._session.scatter_lane.rank == 0:
            _LOG.info("auto, %s", self.history[-1])


def auto_plans(parameters: Sequence[Parameter]) -> dict[str, dict[str, PhaseSpecs]]:
    """The plans that ``auto`` chooses from, by name."""
    return {name: choose_specs(name, parameters) for name in (*SPECS, OFF)}
