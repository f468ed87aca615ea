"""A race ends with the fastest candidate, prefers the faithful one among equals, and spares hopeless trials."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.policies.race import Candidate, Race

_LIMIT = 100  # turns; more would be a race that does not end


def run(race: Race, seconds: list[float]) -> list[int]:
    """Returns who had each turn, until the race is settled."""
    turns = []
    while not race.is_settled:
        turns.append(race.current)
        race.record(seconds[race.current])
        assert len(turns) < _LIMIT
    return turns


def candidates(*predicted: float, floors: tuple[float, ...] = ()) -> list[Candidate]:
    floors = floors or (0.0,) * len(predicted)
    return [Candidate(f"c{i}", p, f) for i, (p, f) in enumerate(zip(predicted, floors, strict=True))]


def test_the_one_predicted_to_be_fastest_goes_first_and_the_measured_one_wins() -> None:
    race = Race(candidates(3.0, 1.0, 2.0), plausible=math.inf)
    turns = run(race, [1.0, 2.0, 3.0])
    assert turns[0] == 1
    assert race.current == 0
    assert turns.count(2) == 1, "a hopeless candidate is tried once"


def test_of_two_that_are_equally_fast_the_more_faithful_one_wins() -> None:
    race = Race(candidates(1.0, 1.0))
    run(race, [1.01, 1.0])
    assert race.current == 0


def test_a_clear_gain_beats_faithfulness() -> None:
    race = Race(candidates(1.0, 1.0))
    run(race, [1.05, 1.0])
    assert race.current == 1


def test_a_candidate_that_cannot_be_faster_is_never_tried() -> None:
    race = Race(candidates(9.0, 1.0, floors=(2.0, 0.0)), plausible=math.inf)
    assert run(race, [5.0, 1.0]) == [1]
    assert race.seconds == {"c1": 1.0}


def test_a_floor_above_the_own_time_does_not_put_out_who_was_tried() -> None:
    race = Race(candidates(1.0, 1.5, floors=(2.0, 0.0)), plausible=math.inf)
    run(race, [1.0, 3.0])
    assert race.current == 0


def test_an_implausible_candidate_is_never_tried() -> None:
    race = Race(candidates(1.0, 5.0), plausible=2.0)
    assert race.is_settled
    assert race.current == 0


def test_one_slow_turn_does_not_decide_between_close_candidates() -> None:
    race = Race(candidates(1.0, 1.0), rounds=3)
    noisy = {0: [1.0, 1.0, 1.0], 1: [1.3, 0.9, 0.9]}
    while not race.is_settled:
        race.record(noisy[race.current].pop(0))
    assert race.current == 1


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.data())
def test_every_race_ends_close_to_the_best(seconds: list[float], data: st.DataObject) -> None:
    predicted = data.draw(st.lists(st.floats(0.01, 10), min_size=len(seconds), max_size=len(seconds)))
    race = Race(candidates(*predicted), plausible=math.inf)
    turns = run(race, seconds)
    assert seconds[race.current] <= 1.03 * min(seconds)
    assert len(turns) <= 3 * len(seconds)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_numbers_give_the_same_turns(count: int) -> None:
    seconds = [1.0 + 0.1 * i for i in range(count)]
    races = [Race(candidates(*reversed(seconds)), plausible=math.inf) for _ in range(2)]
    assert run(races[0], seconds) == run(races[1], seconds)
