"""A rank that dies, freezes or raises: the others end with our class, and know who and where."""

from __future__ import annotations

import re
import signal

import pytest

from cgx.errors import CollectiveTimeoutError, PeerLostError, TransportError
from tests.faults.jobs import VICTIM, reduce_until, train_until, train_with_a_broken_codec
from tests.harness import Outcome, outcomes_of

# A rank that only finds out by its timeout would be killed by the harness before that.
PATIENT_SECONDS, HARNESS_SECONDS = 100.0, 40.0
SHORT_SECONDS, GRACE_SECONDS = 4.0, 10.0
FIRST_LAYERS, LAST_LAYER = 5, 0  # gradients come from the end


def survivors(outcomes: list[Outcome]) -> list[Outcome]:
    """Return how the others ended, after checking that they ended by themselves."""
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != VICTIM]
    for outcome in others:
        assert outcome.exit_code == 0, outcome
    return others


def assert_named(error: BaseException | None, *, where: str = r"bucket \d+, reduction \d+") -> None:
    """The message says which bucket and reduction, and which peer."""
    assert error is not None
    assert re.match(where, str(error)), error
    assert re.search(r"(from|to) rank \d", str(error)), error


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layer", [FIRST_LAYERS, LAST_LAYER])
@pytest.mark.parametrize("fault", ["die", "leave"])
def test_a_rank_that_dies_in_backward_is_lost_to_all_others_at_once(fault: str, layer: int, world_size: int) -> None:
    outcomes = outcomes_of(
        train_until, world_size, fault, layer,
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS,
    )  # fmt: skip
    assert outcomes[VICTIM].exit_code == (-signal.SIGKILL if fault == "die" else 7)
    for outcome in survivors(outcomes):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert_named(outcome.error)
        if world_size == 2:
            assert f"rank {VICTIM}" in str(outcome.error)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layer", [FIRST_LAYERS, LAST_LAYER])
def test_a_rank_that_raises_in_backward_and_ends_is_lost_to_all_others(layer: int, world_size: int) -> None:
    outcomes = outcomes_of(
        train_until, world_size, "fail", layer,
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS,
    )  # fmt: skip
    assert isinstance(outcomes[VICTIM].error, ZeroDivisionError)
    assert outcomes[VICTIM].exit_code == 0
    for outcome in survivors(outcomes):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert_named(outcome.error)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fault", ["freeze", "fail"])
def test_a_rank_that_stays_silent_is_a_timeout(fault: str, world_size: int) -> None:
    outcomes = outcomes_of(
        train_until, world_size, fault, LAST_LAYER, True, doomed=[VICTIM],
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=SHORT_SECONDS,
    )  # fmt: skip
    errors = [outcome.error for outcome in survivors(outcomes)]
    assert any(isinstance(error, CollectiveTimeoutError) and f"rank {VICTIM}" in str(error) for error in errors), errors
    for outcome in survivors(outcomes):
        # The first to give up closes its lanes: the next hears that, or gives up itself.
        assert isinstance(outcome.error, CollectiveTimeoutError | PeerLostError), outcome
        assert_named(outcome.error)
        assert outcome.seconds < SHORT_SECONDS + GRACE_SECONDS


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("method", "call"), [("compress", 1), ("compress", 4), ("reduce", 2), ("decompress", 2)])
def test_a_codec_that_raises_breaks_all_sessions_at_once_and_no_process(
    method: str, call: int, world_size: int
) -> None:
    outcomes = outcomes_of(
        train_with_a_broken_codec, world_size, method, call,
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS,
    )  # fmt: skip
    for rank, outcome in enumerate(outcomes):  # shown when the test fails: which rank waited, and where
        print(f"rank {rank}: {outcome.error!r}, exit code {outcome.exit_code}\n{outcome.trace}")
    error = outcomes[VICTIM].error
    assert isinstance(error, TransportError)
    assert "ZeroDivisionError: a kernel failed" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError) or "ZeroDivisionError" in outcomes[VICTIM].trace
    for outcome in survivors(outcomes):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert_named(outcome.error)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fault", ["die", "leave"])
def test_a_rank_that_dies_in_the_middle_of_a_reduction_by_hand(fault: str, world_size: int) -> None:
    outcomes = outcomes_of(
        reduce_until, world_size, fault,
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS,
    )  # fmt: skip
    for outcome in survivors(outcomes):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert_named(outcome.error, where=r"cgx\.all_reduce, call \d+")


def test_a_rank_that_freezes_in_the_middle_of_a_reduction_by_hand() -> None:
    outcomes = outcomes_of(
        reduce_until, 2, "freeze", doomed=[VICTIM],
        timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=SHORT_SECONDS,
    )  # fmt: skip
    (outcome,) = survivors(outcomes)
    assert isinstance(outcome.error, CollectiveTimeoutError), outcome
    assert_named(outcome.error, where=r"cgx\.all_reduce, call \d+")
    assert outcome.seconds < SHORT_SECONDS + GRACE_SECONDS
