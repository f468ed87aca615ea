"""Virtual ranks against the real ones: processes under Gloo whose DDP model `cgx.compress` made communicate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.cli.demo.models import TASKS
from cgx.core.algorithm import Algorithm
from cgx.errors import SpecError
from cgx.policies.error import relative_error, sampling_noise, squared_error
from cgx.torch.virtual import VirtualGroup
from tests.harness import run_processes
from tests.integration.training import batch
from tests.integration.zoo import mlp

WORLD, STEPS = 3, 3
PLAN = {"0.weight": "uniform:3/block=64+uniform:5", "*": "uniform:4"}
CASES: dict[str, dict[str, Any]] = {
    "scatter_reduce": {"how": "uniform:4", "seed": 9},
    "all_gather": {"how": "uniform:4", "algorithm": "all_gather"},
    "ring": {"how": "uniform:8+uniform:4", "algorithm": "ring"},
    "plan": {"how": PLAN},
    "error feedback": {"how": "uniform:1", "error_feedback": True},
    "bf16": {"how": "bf16"},
}


def loss_of(model: nn.Module, both: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a micro-batch."""
    x, y = both
    return nn.functional.cross_entropy(model(x), y)


def new_model() -> nn.Module:
    """Return the same model everywhere."""
    torch.manual_seed(3)
    return mlp()


def train(model: nn.Module, backward: Any) -> list[bytes]:
    """Train a few steps; return all gradients' bits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        seen += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return seen


def train_for_real(rank: int) -> list[list[bytes]]:
    """Train each case under DDP."""
    seen = []
    for options in CASES.values():
        model = DistributedDataParallel(new_model(), bucket_cap_mb=0.02)
        handle = cgx.compress(model, **options)
        seen.append(train(model.module, lambda step, m=model: loss_of(m, batch(rank, step)).backward()))
        handle.remove()
    return seen


def test_gradients_are_bit_for_bit_those_of_real_ranks() -> None:
    real = run_processes(train_for_real, WORLD)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have it: sums of a matrix product depend on it
    try:
        for index, (name, options) in enumerate(CASES.items()):
            model = new_model()
            options = dict(options)
            group = VirtualGroup(model, WORLD, options.pop("how"), **options)
            seen = train(model, lambda step, g=group: g.backward(loss_of, [batch(rank, step) for rank in range(WORLD)]))
            assert all(ranks[index] == seen for ranks in real), name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("algorithm", ["scatter_reduce", "all_gather", "ring"])
def test_what_is_told_about_the_error_is_so(algorithm: Algorithm) -> None:
    model, world = new_model(), 5
    batches = [batch(rank, 0) for rank in range(world)]
    reduced = VirtualGroup(model, world, "uniform:4", algorithm=algorithm).backward(loss_of, batches)
    parts = []
    for one in batches:
        other = new_model()
        loss_of(other, one).backward()
        parts.append(np.concatenate([p.grad.reshape(-1).numpy() for p in other.parameters()]))
    exact = np.mean(parts, 0, dtype=np.float64)
    np.testing.assert_allclose(reduced.exact, exact, rtol=1e-12, atol=1e-12)
    in_grad = np.concatenate([p.grad.reshape(-1).numpy() for p in model.parameters()])
    assert np.array_equal(in_grad, reduced.mean)
    assert 1e-4 < reduced.relative_error < 0.1
    assert reduced.relative_error == pytest.approx(relative_error(in_grad - exact, exact))
    noise = np.square(np.array(parts, np.float64) - exact).sum() / (world * (world - 1))
    assert reduced.sampling_noise == pytest.approx(noise, rel=1e-6)
    assert reduced.extra_noise == pytest.approx(squared_error(in_grad - exact) / noise, rel=1e-6)


def test_off_is_the_exact_mean() -> None:
    reduced = VirtualGroup(new_model(), 4, "off").backward(loss_of, [batch(rank, 0) for rank in range(4)])
    assert np.array_equal(reduced.mean, reduced.exact.astype(np.float32))
    assert reduced.relative_error < 1e-14


def test_frozen_parameters_are_left_alone_and_unused_ones_get_zeros() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad = False
    group = VirtualGroup(model, 2)
    group.backward(lambda m, x: m[1](m[0](x)).square().mean(), [torch.randn(4, 64) for _ in range(2)])
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    assert not model[2].weight.grad.any()


def test_what_cannot_be_reduced_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with pytest.raises(SpecError, match="one flat gradient"):
        VirtualGroup(model, 2)
    with pytest.raises(SpecError, match="error feedback"):
        VirtualGroup(new_model(), 2, algorithm="ring", error_feedback=True)
    with pytest.raises(SpecError, match="3 micro-batches"):
        VirtualGroup(new_model(), 2).backward(loss_of, [batch(0, 0)] * 3)


def test_the_noise_of_four_ranks_is_that_of_many_micro_batches() -> None:
    # Weights stay as they are, so what many micro-batches find is the truth for every four others.
    task, ranks, groups, many = TASKS["convnet"], 4, 16, 256
    torch.manual_seed(0)
    model = task.build()
    optimizer = task.optimizer(model)
    virtual = VirtualGroup(model, ranks, "uniform:4")
    for step in range(10):
        virtual.backward(task.loss, [task.batch(0, rank, step) for rank in range(ranks)])
        optimizer.step()
    noises = [
        virtual.backward(task.loss, [task.batch(1, rank, step) for rank in range(ranks)]).sampling_noise
        for step in range(groups)
    ]
    wide = VirtualGroup(model, many, "off")
    truth = wide.backward(task.loss, [task.batch(2, rank, 0) for rank in range(many)])
    whole = sampling_noise(truth.squared_norms.sum(1), squared_error(truth.exact)) * many / ranks
    assert np.mean(noises) == pytest.approx(whole, rel=0.2)
