"""Runs that end and begin again: a notebook cell run twice, a group made anew."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import run_processes
from tests.integration.training import all_equal, batch, digest
from tests.integration.zoo import mlp


def cell(rank: int, how: str | None) -> str:
    """Run a notebook's cell once: make a model, compress it twice, train."""
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    if how is not None:
        assert cgx.compress(model, how) is cgx.compress(model, how)
    for number in range(3):
        model.zero_grad()
        x, y = batch(rank, number)
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return digest(model.parameters())


def notebook(rank: int) -> list[tuple[str, str, str]]:
    """Run the cell twice in a group, then in a group made anew after the first is destroyed."""
    store = dist.distributed_c10d._get_default_store()
    seen = []
    for number in range(3):
        seen.append((cell(rank, None), cell(rank, "off"), cell(rank, "uniform:4")))
        if number:
            dist.destroy_process_group()
            prefixed = dist.PrefixStore(f"cell {number}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2)
    return seen


def test_a_notebook_cell_run_again_gives_the_same_bits() -> None:
    results = run_processes(notebook, 2)
    assert all_equal(results)
    assert all_equal(results[0])
    stock, off, compressed = results[0][0]
    assert off == stock != compressed
