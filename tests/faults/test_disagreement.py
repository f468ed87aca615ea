"""Ranks that disagree, that do not come, or whose session is broken: a clear error on every rank, and no hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.compressors.uniform import UniformCompressor
from tests.harness import outcomes_of

TIMEOUT = 4.0
BOUND = TIMEOUT + 10.0


def model_of(width: int = 300) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 200), nn.ReLU(), nn.Linear(200, 64))


def _break_the_codec() -> None:
    UniformCompressor.reduce = _broken_reduce  # type: ignore[method-assign,assignment]


def _broken_reduce(*_: Any, **__: Any) -> int:
    raise ArithmeticError("a broken kernel")


def _use_after_failure(rank: int) -> str:
    x = torch.randn(5000)
    cgx.all_reduce(x)
    if rank == 1:
        _break_the_codec()
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
