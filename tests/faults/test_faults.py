"""What survivors see when a rank dies, freezes, raises or disagrees: our class, the bucket, the peer, and no hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.compressors.uniform import UniformCompressor
from tests.harness import Outcome, outcomes_of

TIMEOUT = 4.0
BOUND = TIMEOUT + 10.0
BAD_STEP = 3


def model_of(width: int = 300) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 200), nn.ReLU(), nn.Linear(200, 64))


def _train(rank: int, fault: str, victim: int) -> float:
    """Trains until the fault; raises what `backward` raised, or returns the seconds this rank took to hear of it."""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.05)
    cgx.compress(ddp)
    for step in range(8):
        loss = ddp(torch.randn(8, 64)).square().mean()
        if step == BAD_STEP and rank == victim:
            _strike(fault)
        loss.backward()
    return 0.0


def _strike(fault: str) -> None:
    if fault == "exits":
        os._exit(3)
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freezes":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ArithmeticError("the user's own error")
    if fault == "codec raises":
        UniformCompressor.reduce = _broken_reduce  # type: ignore[method-assign,assignment]


def _broken_reduce(*_: Any, **__: Any) -> int:
    raise ArithmeticError("a broken kernel")


def survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    return [outcome for rank, outcome in enumerate(outcomes) if rank != victim]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fault", ["exits", "is killed", "raises", "codec raises"])
def test_a_lost_rank_ends_the_step_of_all_others(fault: str, world_size: int) -> None:
    victim = world_size - 1
    outcomes = outcomes_of(_train, world_size, fault, victim, group_timeout_seconds=TIMEOUT, timeout_seconds=BOUND + 20)
    for outcome in survivors(outcomes, victim):
        assert isinstance(outcome.error, cgx.PeerLostError), outcome
        assert outcome.exit_code == 0, outcome.trace
        assert outcome.seconds < BOUND
        assert "bucket 0, reduction" in str(outcome.error)
    told = [str(outcome.error) for outcome in survivors(outcomes, victim)]
    assert any(f"rank {victim}" in text for text in told)
    if fault == "raises":
        assert isinstance(outcomes[victim].error, ArithmeticError)
    if fault == "codec raises":
        error = outcomes[victim].error
        assert isinstance(error, cgx.TransportError)
        assert "bucket 0, reduction" in str(error)
        assert "ArithmeticError: a broken kernel" in str(error)


def test_a_frozen_rank_ends_the_step_by_the_groups_timeout() -> None:
    outcomes = outcomes_of(
        _train, 2, "freezes", 1, group_timeout_seconds=TIMEOUT, timeout_seconds=BOUND + 20, doomed=[1]
    )
    error = outcomes[0].error
    assert isinstance(error, cgx.CollectiveTimeoutError), outcomes[0]
    assert "rank 1" in str(error)
    assert "bucket 0, reduction" in str(error)
    assert f"timeout of {TIMEOUT:.0f} s" in str(error)
    assert outcomes[0].seconds < BOUND


def _fail_and_stay(rank: int) -> float:
    """A rank whose codec fails lives on; how long until the other one hears of it?"""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.05)
    cgx.compress(ddp)
    ddp(torch.randn(8, 64)).square().mean().backward()
    if rank == 1:
        _strike("codec raises")
    start = time.monotonic()
    with pytest.raises(cgx.TransportError):
        ddp(torch.randn(8, 64)).square().mean().backward()
    heard = time.monotonic() - start
    if rank == 1:
        time.sleep(TIMEOUT / 2)
    return heard


def test_a_failing_session_closes_its_lanes_at_once() -> None:
    outcomes = outcomes_of(_fail_and_stay, 2, group_timeout_seconds=TIMEOUT, timeout_seconds=BOUND + 20)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].value < TIMEOUT / 2  # before the failing process ended, and not by the timeout


def _use_after_failure(rank: int) -> str:
    x = torch.randn(5000)
    cgx.all_reduce(x)
    if rank == 1:
        _strike("codec raises")
    with pytest.raises(cgx.TransportError):
        cgx.all_reduce(x)
    with pytest.raises(cgx.TransportError) as caught:
        cgx.all_reduce(x)
    return str(caught.value)


def test_a_broken_session_says_so() -> None:
    outcomes = outcomes_of(_use_after_failure, 2, group_timeout_seconds=TIMEOUT, timeout_seconds=BOUND + 20)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert "broken by an earlier failure" in outcome.value
        assert "call 1" in outcome.value


def _disagree(rank: int, about: str) -> str:
    options: dict[str, Any] = {}
    how: Any = "uniform:4"
    if rank == 1:
        options = {"seed": {"seed": 1}, "piece": {"piece_nbytes": 1 << 16}}.get(about, {})
        how = "uniform:5" if about == "spec" else how
    if about == "shape":
        tensors = {"w": torch.randn(30 + rank, 50)}
        with pytest.raises(cgx.PlanMismatchError) as caught:
            cgx.all_reduce(tensors)
        return str(caught.value)
    if about == "names":
        with pytest.raises(cgx.PlanMismatchError) as caught:
            cgx.all_reduce({"ab"[rank]: torch.randn(50)})
        return str(caught.value)
    ddp = DistributedDataParallel(model_of())
    with pytest.raises(cgx.PlanMismatchError) as caught:
        cgx.compress(ddp, how, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("about", "difference"),
    [
        ("spec", "uniform:5"),
        ("seed", "rank 0 has 'seed: 0', rank 1 has 'seed: 1'"),
        ("piece", "piece bytes: 65536"),
        ("shape", "[31, 50]"),
        ("names", "rank 1 has 'parameter b"),
    ],
)
def test_disagreement_is_named_on_every_rank(about: str, difference: str) -> None:
    for outcome in outcomes_of(_disagree, 2, about, group_timeout_seconds=TIMEOUT, timeout_seconds=60):
        assert outcome.error is None, outcome.trace
        assert "ranks disagree about" in outcome.value
        assert difference in outcome.value


def _in_different_orders(rank: int) -> str:
    small, large = torch.randn(100), torch.randn(300_000)
    calls = [("small", small), ("large", large)]
    for name, tensor in calls:
        cgx.all_reduce({name: tensor})
    name, tensor = calls[rank]
    with pytest.raises(cgx.PlanMismatchError) as caught:
        cgx.all_reduce({name: tensor})
    return str(caught.value)


def test_different_orders_are_found_before_a_payload_arrives() -> None:
    for rank, outcome in enumerate(outcomes_of(_in_different_orders, 2, group_timeout_seconds=TIMEOUT)):
        assert outcome.error is None, outcome.trace
        assert outcome.exit_code == 0
        assert f"rank {1 - rank} is in another reduction" in outcome.value


def _one_rank_never_comes(rank: int) -> None:
    ddp = DistributedDataParallel(model_of())
    if rank == 0:
        cgx.compress(ddp)
    else:
        time.sleep(TIMEOUT + 3)


def test_a_rank_that_does_not_call_compress() -> None:
    outcomes = outcomes_of(_one_rank_never_comes, 2, group_timeout_seconds=TIMEOUT, timeout_seconds=BOUND + 20)
    assert isinstance(outcomes[0].error, cgx.TransportError), outcomes[0]
    assert outcomes[0].seconds < BOUND
