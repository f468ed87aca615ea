"""Real training recipes, each beside stock DDP: exact modes give stock's bits, compressed ones a close gradient."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import cgx
from tests.harness import run_processes
from tests.integration.training import all_equal, batch, digest
from tests.integration.zoo import Checkpointed, mlp

FINE = "uniform:8/rounding=nearest"
NMSE = 1e-3  # a step of 8 bits is 1/255 of a block's span, twice 3 to 4 sigma: (8/255)**2/12 = 8e-5 a phase
Recipe = Callable[[int, Any], list[Tensor]]


def model_of(module: nn.Module, how: Any, **ddp: Any) -> DistributedDataParallel:
    """Return a DDP model, compressed unless `how` is None (stock)."""
    model = DistributedDataParallel(module, **ddp)
    if how is not None:
        cgx.compress(model, how)
    return model


def built(build: Callable[[], nn.Module] = mlp) -> nn.Module:
    """Return the same module on every call and rank."""
    torch.manual_seed(3)
    return build()


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """Return the loss of this rank and step."""
    x, y = batch(rank, number)
    return nn.functional.cross_entropy(model(x).float(), y)


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of all gradients there are."""
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def autocast(rank: int, how: Any, dtype: torch.dtype) -> list[Tensor]:
    """Autocast with a scaler, two backward passes a step, and clipping."""
    model = model_of(built(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # equal weights, so that gradients can be compared
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for number in range(2):
        optimizer.zero_grad()
        with model.no_sync(), torch.autocast("cpu", dtype):
            loss = loss_of(model, rank, 2 * number)
        with model.no_sync():
            scaler.scale(loss / 2).backward()
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, rank, 2 * number + 1)
        scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        seen += [*gradients(model), norm.detach()]
    return seen


def autocast_bf16(rank: int, how: Any) -> list[Tensor]:
    return autocast(rank, how, torch.bfloat16)


def autocast_fp16(rank: int, how: Any) -> list[Tensor]:
    return autocast(rank, how, torch.float16)


def averaged(rank: int, how: Any) -> list[Tensor]:
    """An exponential moving average of the weights, updated after each step."""
    model = model_of(built(), how)
    mean = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
        mean.update_parameters(model.module)
    return [parameter.detach() for parameter in mean.module.parameters()]


class Lora(nn.Module):
    """A frozen layer plus a trained product of two thin matrices, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / rank)  # LoRA starts at zero; its gradient would

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted() -> nn.Module:
    model = mlp().requires_grad_(False)
    for at, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(model, at, Lora(layer, 16))
    return model


def adapters(rank: int, how: Any) -> list[Tensor]:
    """Only adapters have gradients; the base stays as it was."""
    model = model_of(built(adapted), how)
    before = digest(p for p in model.parameters() if not p.requires_grad)
    for number in range(2):
        model.zero_grad()
        loss_of(model, rank, number).backward()
    assert before == digest(p for p in model.parameters() if not p.requires_grad)
    return gradients(model)


def checkpointed(rank: int, how: Any) -> list[Tensor]:
    """Activation checkpointing runs the forward pass again inside the backward pass."""
    model = model_of(built(lambda: Checkpointed(use_reentrant=False)), how)
    loss_of(model, rank, 0).backward()
    return gradients(model)


def deterministic(rank: int, how: Any) -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    model = model_of(built(), how)
    loss_of(model, rank, 0).backward()
    return gradients(model)


def profiled(rank: int, how: Any) -> list[Tensor]:
    """Three steps under the profiler, with its schedule."""
    model = model_of(built(), how)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as profiler:
        for number in range(3):
            model.zero_grad()
            loss_of(model, rank, number).backward()
            profiler.step()
    assert profiler.events()
    return gradients(model)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def buffers(rank: int, how: Any) -> list[Tensor]:
    """Running statistics are those of rank 0, broadcast at the next forward pass."""
    model = model_of(built(normalised), how)
    for number in range(3):
        model.zero_grad()
        loss_of(model, rank, number).backward()
    with torch.no_grad():
        model._sync_buffers()
    return [*gradients(model), *[b.double() for b in model.buffers()]]


def loaded(rank: int, how: Any) -> list[Tensor]:
    """Workers of a DataLoader are forked while cgx has a session, its thread and its sockets."""
    model = model_of(built(), how)
    loss_of(model, rank, 0).backward()
    x, y = batch(0, 5)
    data = TensorDataset(x, y)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # the harness's ranks may have children
    for inputs, targets in loader:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
    return gradients(model)


def forked(rank: int, how: Any) -> list[Tensor]:
    """A child forked between two steps ends as it should and leaves the parent's session alone."""
    model = model_of(built(), how)
    loss_of(model, rank, 0).backward()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    return gradients(model)


def compiled_before(rank: int, how: Any) -> list[Tensor]:
    """Compile, then wrap."""
    model = model_of(torch.compile(built(), backend="aot_eager"), how)
    return compiled_steps(model, model, rank)


def compiled_after(rank: int, how: Any) -> list[Tensor]:
    """Wrap, then compile: torch splits the graph where buckets end."""
    model = model_of(built(), how)
    return compiled_steps(torch.compile(model, backend="aot_eager"), model, rank)


def compiled_steps(compiled: Any, model: nn.Module, rank: int) -> list[Tensor]:
    for number in range(2):
        model.zero_grad()
        loss_of(compiled, rank, number).backward()
    return gradients(model)


def uneven(rank: int, how: Any) -> list[Tensor]:
    """Ranks have one and three batches; the rank that is out of data shadows the other's reductions."""
    model = model_of(built(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for number in range(1 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


RECIPES: list[Recipe] = [
    autocast_bf16, autocast_fp16, averaged, adapters, checkpointed, deterministic, profiled, buffers, loaded,
    forked, compiled_before, compiled_after, uneven,
]  # fmt: skip


def three_ways(rank: int, recipe: Recipe) -> dict[str, Any]:
    """Return digests of stock, off and fine, and how far fine is from stock."""
    stock, off, fine = (recipe(rank, how) for how in (None, "off", FINE))
    error = sum(((a - b).double() ** 2).sum().item() for a, b in zip(fine, stock, strict=True))
    energy = sum((a.double() ** 2).sum().item() for a in stock)
    return {"stock": digest(stock), "off": digest(off), "fine": digest(fine), "nmse": error / energy}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe_beside_stock(recipe: Recipe) -> None:
    results = run_processes(three_ways, 2, recipe, timeout_seconds=100)
    assert all_equal(results), "replicas differ"
    result = results[0]
    assert result["off"] == result["stock"]
    assert 0 < result["nmse"] < NMSE


def synchronised(rank: int) -> str:
    """What stock DDP says of SyncBatchNorm on the CPU, before cgx is asked."""
    with pytest.raises(ValueError, match="SyncBatchNorm") as refusal:
        model_of(nn.SyncBatchNorm.convert_sync_batchnorm(built(normalised)), "uniform:4")
    return str(refusal.value)


def test_sync_batch_norm_is_for_accelerators() -> None:
    assert run_processes(synchronised, 2) == ["SyncBatchNorm layers only work with GPU modules"] * 2
