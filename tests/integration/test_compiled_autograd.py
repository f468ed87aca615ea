"""DDP with its Python reducer under compiled autograd: hooks get gradients one by one, not in buckets."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import run_processes
from tests.integration.training import all_equal, batch, digest
from tests.integration.zoo import mlp


def train(rank: int, how: Any, options: dict[str, Any]) -> tuple[list[NDArray[np.float32]], str, Any]:
    warnings.simplefilter("default")
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    handle = None if how is None else cgx.compress(model, how, **options)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    grads = []
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for number in range(4):
            optimizer.zero_grad()
            for part in range(2):
                model.require_backward_grad_sync = part == 1
                x, y = batch(rank, 2 * number + part)
                nn.functional.cross_entropy(compiled(x), y).backward()
            grads = [parameter.grad.numpy().copy() for parameter in model.parameters()]
            optimizer.step()
    report = None if handle is None else handle.report()
    return grads, digest(model.parameters()), report


def test_gradients_are_those_of_stock() -> None:
    (stock, bits, _), _ = run_processes(train, 2, None, {}, timeout_seconds=110.0)
    for how in ("off", "identity"):
        results = run_processes(train, 2, how, {}, timeout_seconds=110.0)
        for mine, theirs in zip(results[0][0], stock, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    compressed = run_processes(train, 2, "uniform:8", {}, timeout_seconds=110.0)
    assert all_equal([result[1] for result in compressed])
    assert compressed[0][1] != bits
    report = compressed[0][2]
    assert report.ratio > 3
    assert report.reductions == 4 * len(stock)
    error = sum(np.square(a - b).sum() for a, b in zip(compressed[0][0], stock, strict=True))
    assert error < 1e-2 * sum(np.square(b).sum() for b in stock)


def test_auto_chooses() -> None:
    results = run_processes(train, 2, "auto", {"throttle_bit_s": 1e7}, timeout_seconds=110.0)
    assert all_equal([result[1] for result in results])
    auto = results[0][2].auto
    assert auto.choice != "off"
    assert auto.history[0].startswith("step 0")
