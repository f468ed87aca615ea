"""Gradients of every kind of model through DDP and cgx, against the mean of what ranks compute alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.core.plan import MIN_COMPRESSED_NUMEL
from tests.harness import run_processes
from tests.integration.training import digest
from tests.integration.zoo import ZOO

FINE = "uniform:8/block=32/rounding=nearest/scale=fp32"
HALF = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def loss_of(output: Tensor) -> Tensor:
    """Return something whose gradient depends on every element."""
    return output.float().pow(2).mean() + output.float().sin().sum() / 64


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient in the widest dtype of its kind."""
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().to(wide)


def mean_over_ranks(gradient: Tensor) -> Tensor:
    """Return the mean in double precision."""
    mean = dense(gradient).contiguous()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def check_gradient(name: str, parameter: nn.Parameter, expected: Tensor) -> None:
    """Compare a reduced gradient with the mean; only what may be compressed may be off by more than rounding."""
    assert parameter.grad is not None, name
    found = dense(parameter.grad)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    rounding = HALF.get(parameter.dtype, 1e-5 if parameter.dtype in (torch.float32, torch.complex64) else 1e-12)
    is_compressed = (
        parameter.dtype in (torch.float32, *HALF) and parameter.dim() > 1
        and parameter.numel() >= MIN_COMPRESSED_NUMEL and not parameter.grad.is_sparse
    )  # fmt: skip
    # Both phases are off by half a step of their block, which spans at most twice the largest element.
    allowed = largest * (4 * rounding + (2 * 2 / 255 if is_compressed else 0))
    off = (found - expected).abs().max().item() if found.numel() else 0.0
    assert off <= allowed + 1e-12, f"{name}: off by {off}, allowed {allowed}"


def same_everywhere(tensor: Tensor) -> None:
    """Check that all ranks hold the same bits."""
    mine = dense(tensor).contiguous()
    mine = torch.view_as_real(mine) if mine.is_complex() else mine
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)


def train(rank: int, animal_name: str, how: Any, options: dict[str, Any]) -> dict[str, int]:
    """Run the animal's steps, checking every gradient of each."""
    animal = ZOO[animal_name]
    torch.manual_seed(1)
    module = animal.build()
    model = DistributedDataParallel(module, **animal.ddp)
    handle = cgx.compress(model, how, **options)
    alone = copy.deepcopy(module)
    for step in range(animal.steps):
        alone.load_state_dict(module.state_dict())
        batch = animal.batch(rank, step)
        for net in (model, alone):
            net.zero_grad(set_to_none=True)
            loss_of(net(batch)).backward()
        for (name, parameter), reference in zip(module.named_parameters(), alone.parameters(), strict=True):
            is_used = torch.tensor([reference.grad is not None], dtype=torch.int64)
            dist.all_reduce(is_used)
            if not is_used:
                assert parameter.grad is None, f"{name} got a gradient that no rank computed"
                continue
            gradient = torch.zeros_like(reference) if reference.grad is None else reference.grad
            check_gradient(name, parameter, mean_over_ranks(gradient))
            same_everywhere(parameter.grad)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
    return dict(handle.report().plan)


@pytest.mark.parametrize("animal", ZOO)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_the_mean_of_what_ranks_compute_alone(animal: str, world_size: int) -> None:
    run_processes(train, world_size, animal, FINE, {})


@pytest.mark.parametrize("animal", ["plain", "small buckets", "several dtypes", "unused", "sparse embedding", "tied"])
@pytest.mark.parametrize("how", ["off", {"*": "identity"}])
def test_gradients_that_travel_exact_are_the_mean_to_rounding(animal: str, how: Any) -> None:
    run_processes(train, 2, animal, how, {"throttle_bit_s": 1e12} if how == "off" else {})


def gradients_digest(rank: int, animal_name: str, how: Any, options: dict[str, Any]) -> str:
    """Return a hash of all gradients of all steps; `how` None is stock DDP."""
    animal = ZOO[animal_name]
    torch.manual_seed(1)
    model = DistributedDataParallel(animal.build(), **animal.ddp)
    if how is not None:
        cgx.compress(model, how, **options)
    seen = []
    for step in range(animal.steps):
        model.zero_grad(set_to_none=True)
        loss_of(model(animal.batch(rank, step))).backward()
        seen += [dense(p.grad) for p in model.parameters() if p.grad is not None]
    return digest(torch.view_as_real(g) if g.is_complex() else g for g in seen)


def stock_and_off(rank: int, animal: str) -> list[str]:
    """Return the digests of stock DDP, of "off", and of "off" through the lanes of a session."""
    return [
        gradients_digest(rank, animal, how, options)
        for how, options in [(None, {}), ("off", {}), ("off", {"throttle_bit_s": 1e12})]
    ]


@pytest.mark.parametrize("animal", ZOO)
def test_off_is_stock_bit_for_bit(animal: str) -> None:
    for digests in run_processes(stock_and_off, 3, animal):
        assert len(set(digests)) == 1
