"""Finds the fastest of a few ways by trying them in turn, and wastes little time on the slow ones.

Everything here is a pure function of the seconds it is given: ranks that record the same numbers decide the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

_HOPELESS = 2.0  # times the best: one try is enough to give up
_SLOWER = 1.06  # times the best, by the faster of two tries: hiccups only make a turn longer
_AS_GOOD = 1.03  # times the best: the more faithful one wins


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do it.

    Args:
        name: What reports call it.
        predicted_s: What the model expects.
        floor_s: What physics allows at best: a candidate is never tried once another is faster than this.
    """

    name: str
    predicted_s: float
    floor_s: float = 0.0


@final
@dataclass(slots=True)
class _Entry:
    candidate: Candidate
    tries: list[float] = field(default_factory=list)
    is_out: bool = False

    @property
    def seconds(self) -> float:
        return statistics.median(self.tries)


@final
class Race:
    """Candidates take turns; the slow ones drop out; what is left after ``rounds`` turns is compared.

    Args:
        candidates: The most faithful first: of two that are equally fast, the earlier one wins.
        rounds: Most turns of each candidate, at least 1.
        plausible: Candidates predicted to take this many times longer than the best are never tried.
    """

    def __init__(self, candidates: Sequence[Candidate], *, rounds: int = 3, plausible: float = 2.0) -> None:
        best = min(candidate.predicted_s for candidate in candidates)
        self._entries = [_Entry(c, is_out=c.predicted_s > plausible * best) for c in candidates]
        self._rounds = rounds
        self._current = min(self._alive(), key=lambda i: candidates[i].predicted_s)
        self._winner: int | None = None
        self._settle_if_decided()

    @property
    def current(self) -> int:
        """Index of the candidate to use now: the one on trial, or the winner."""
        return self._current if self._winner is None else self._winner

    @property
    def is_settled(self) -> bool:
        """True when there is a winner."""
        return self._winner is not None

    @property
    def seconds(self) -> dict[str, float]:
        """Median of every candidate that was tried, by name."""
        return {entry.candidate.name: entry.seconds for entry in self._entries if entry.tries}

    @property
    def settled_seconds(self) -> float | None:
        """Median of the winner; None without one, or when it won untried."""
        winner = None if self._winner is None else self._entries[self._winner]
        return winner.seconds if winner is not None and winner.tries else None

    def settle(self, winner: str, seconds: Mapping[str, float]) -> None:
        """Takes over what an earlier race among these candidates found, and the times it was found by."""
        names = [entry.candidate.name for entry in self._entries]
        self._winner = names.index(winner)
        for entry in self._entries:
            name = entry.candidate.name
            entry.tries = [seconds[name]] if name in seconds else []

    def record(self, seconds: float) -> None:
        """Takes the time of the current candidate's turn (agreed by all ranks) and moves on."""
        self._entries[self._current].tries.append(seconds)
        tried = [entry for entry in self._entries if entry.tries]
        best = min(entry.seconds for entry in tried)
        for entry in self._entries:
            if entry.tries:
                entry.is_out |= min(entry.tries) > best * (_HOPELESS if len(entry.tries) == 1 else _SLOWER)
            else:
                entry.is_out |= entry.candidate.floor_s > best
        self._settle_if_decided()
        if self._winner is None:
            # The one with the fewest turns next; among equals the one expected to be fastest.
            self._current = min(
                self._alive(),
                key=lambda i: (len(self._entries[i].tries), self._entries[i].candidate.predicted_s),
            )

    def _alive(self) -> list[int]:
        return [i for i, entry in enumerate(self._entries) if not entry.is_out]

    def _settle_if_decided(self) -> None:
        alive = self._alive()
        if len(alive) == 1:
            self._winner = alive[0]
        elif all(len(self._entries[i].tries) >= self._rounds for i in alive):
            best = min(self._entries[i].seconds for i in alive)
            self._winner = next(i for i in alive if self._entries[i].seconds <= _AS_GOOD * best)
