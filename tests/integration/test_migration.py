"""The original's names: its hook trains, its settings mean what they meant, and nonsense is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.errors import SpecError
from cgx.torch.original import CGXState, cgx_hook
from tests.harness import outcomes_of, run_processes
from tests.integration.training import SMALL, batch, digest, step, wrapped

FOUR_BITS = {"bits": 4, "bucket_size": 1024}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUANTIZATION_BITS", "BUCKET_SIZE", "MINIMAL_SIZE"):
        monkeypatch.delenv(f"CGX_COMPRESSION_{name}", raising=False)


def as_in_the_original(rank: int, has_group: bool) -> tuple[str, float]:
    model = wrapped(**SMALL)
    group = torch.distributed.group.WORLD if has_group else None
    state = CGXState(group, layer_min_size=1024, compression_params=FOUR_BITS)
    model.register_comm_hook(state, cgx_hook)
    x, y = batch(rank, 0)
    before = nn.functional.cross_entropy(model.module(x), y)
    for _ in range(30):
        step(model, rank, 0)
    report = state.report()
    assert report.reductions > 30  # several buckets, rebuilt after the first step
    assert report.ratio > 3
    assert report.plan["uniform:4/block=1024/rounding=stochastic/scale=fp32"] > 0
    assert report.plan["identity"] > 0  # vectors
    assert nn.functional.cross_entropy(model.module(x), y) < before
    return digest(model.parameters()), report.ratio


@pytest.mark.parametrize("has_group", [True, False])
def test_the_originals_hook_trains_and_keeps_replicas_equal(has_group: bool) -> None:
    told = run_processes(as_in_the_original, 2, has_group)
    assert told[0] == told[1]


def by_layer_size(rank: int) -> None:
    """The first bucket holds small layers only; what comes in later ones is compressed all the same."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), bucket_cap_mb=0.001)
    state = CGXState(None, layer_min_size=1024, compression_params={"bits": 4, "bucket_size": 64})
    model.register_comm_hook(state, cgx_hook)
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    assert list(state.report().plan.values()) == [3, 1]
    assert state.report().ratio > 2
    state.close()
    assert state.report().reductions == 0
    model(torch.randn(4, 64)).sum().backward()  # it opens new connections
    assert state.report().reductions > 0


def test_layers_below_the_minimal_size_travel_exact_and_others_do_not() -> None:
    run_processes(by_layer_size, 2)


def at_32_bits(rank: int) -> None:
    ours, stock = wrapped(**SMALL), wrapped(**SMALL)
    ours.register_comm_hook(CGXState(None, 0, {"bits": 32}), cgx_hook)
    for number in range(4):
        step(ours, rank, number)
        step(stock, rank, number)
    assert digest(ours.parameters()) == digest(stock.parameters())


def test_32_bits_are_stock_training_bit_for_bit() -> None:
    run_processes(at_32_bits, 2)


def with_unequal_settings(rank: int) -> None:
    model = wrapped(**SMALL)
    model.register_comm_hook(CGXState(None, 1024, {"bits": 4 + rank, "bucket_size": 128}), cgx_hook)
    step(model, rank, 0)


def test_ranks_with_unequal_settings_hear_of_it_from_backward() -> None:
    for outcome in outcomes_of(with_unequal_settings, 2):
        assert type(outcome.error).__name__ == "PlanMismatchError", outcome.trace


def test_arguments_win_over_variables_and_those_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(CGXState().specs) == "identity"
    assert CGXState().layer_min_size == 16
    assert "uniform:4/block=512/" in str(CGXState(compression_params={"bits": 4}).specs)
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "3")
    monkeypatch.setenv("CGX_COMPRESSION_BUCKET_SIZE", "256")
    monkeypatch.setenv("CGX_COMPRESSION_MINIMAL_SIZE", "77")
    assert "uniform:3/block=256/" in str(CGXState().specs)
    assert CGXState().layer_min_size == 77
    assert "uniform:8/block=256/" in str(CGXState(compression_params={"bits": 8}).specs)
    assert CGXState(layer_min_size=5).layer_min_size == 5


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"bits": 9}, r"bits=9.*1 to 8, or 32"),
        ({"bits": 4, "bucket_size": 1000}, r"bucket_size=1000.*power of two from 32 to 65536"),
        ({"bits": 4, "block": 64}, r"takes bits and bucket_size; found 'block'"),
    ],
)
def test_values_out_of_range_are_refused_with_what_is_allowed(params: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        CGXState(None, 1024, params)


@pytest.mark.parametrize("value", ["four", "-4", "4.5"])
def test_a_variable_that_is_no_number_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", value)
    with pytest.raises(SpecError, match=f"CGX_COMPRESSION_QUANTIZATION_BITS must be a whole number, found '{value}'"):
        CGXState()
