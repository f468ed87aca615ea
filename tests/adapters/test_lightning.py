"""Lightning and Fabric train a real model on two processes, stock and compressed, and go on from their checkpoints."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.launch import (
    SAVED_AT,
    STEPS,
    Job,
    Trained,
    check_beside_stock,
    check_resume,
    die_at,
    prepare,
    trained,
)
from tests.harness import run_processes
from tests.integration.training import batch
from tests.integration.zoo import mlp


def loader() -> DataLoader[Any]:
    """Rank r of a step takes every second line of 64."""
    parts = [batch(9, step) for step in range(2 * SAVED_AT)]
    return DataLoader(TensorDataset(*(torch.cat(column) for column in zip(*parts, strict=True))), batch_size=32)


def train(rank: int, job: Job) -> Trained:
    prepare(rank)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from cgx.adapters.lightning import CgxMonitor, CgxStrategy

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = mlp(), list[float]()

        def training_step(self, parts: Any, index: int) -> torch.Tensor:
            die_at(job, self.global_step)
            x, y = parts
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(3 + job.first)
    net = Net()
    strategy = "ddp" if job.how is None else CgxStrategy(job.how, job.options, bucket_cap_mb=0.1)
    checkpoints = ModelCheckpoint(dirpath=job.folder / "models", filename="{step}", save_top_k=-1, every_n_epochs=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=STEPS // SAVED_AT * job.accumulate,
        accumulate_grad_batches=job.accumulate,
        callbacks=[checkpoints, CgxMonitor()],
        logger=CSVLogger(job.folder, name="csv", version=0),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader(), ckpt_path=job.folder / "models" / f"step={SAVED_AT}.ckpt" if job.first else None)
    handle = None if job.how is None else strategy.handle
    return trained(net.losses[:: job.accumulate], net.net, handle)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_as_stock_does(tmp_path: Path, accumulate: int) -> None:
    check_beside_stock(train, tmp_path, accumulate=accumulate)
    metrics = tmp_path / "uniform:4" / "csv" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    assert float(rows[-1]["cgx/ratio"]) > 6


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resume(train, tmp_path)
    beside = sorted(path.name for path in (tmp_path / "cut" / "models").glob(f"step={SAVED_AT}.ckpt.cgx-*"))
    assert beside == [f"step={SAVED_AT}.ckpt.cgx-{rank}.pt" for rank in range(2)]


def fabric_train(rank: int, job: Job) -> Trained:
    prepare(rank)
    from lightning.fabric import Fabric

    from cgx.adapters.lightning import CgxFabricStrategy

    strategy = "ddp" if job.how is None else CgxFabricStrategy(job.how, job.options, bucket_cap_mb=0.1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(3 + job.first)
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    state = {"model": model, "optimizer": optimizer}
    if job.first:
        fabric.load(job.folder / "state.ckpt", state)
    losses = []
    for step in range(job.first, STEPS):
        die_at(job, step)
        for part in range(job.accumulate):
            x, y = batch(rank, step * job.accumulate + part)
            with fabric.no_backward_sync(model, enabled=part < job.accumulate - 1):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / job.accumulate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED_AT and not job.first:
            fabric.save(job.folder / "state.ckpt", state)
            fabric.barrier()
    return trained(losses, model.module, None if job.how is None else strategy.handles[0])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fabric_trains_as_stock_does(tmp_path: Path, accumulate: int) -> None:
    check_beside_stock(fabric_train, tmp_path, accumulate=accumulate)


def test_fabric_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resume(fabric_train, tmp_path)


def without_a_state(rank: int, folder: Path) -> list[str]:
    prepare(rank)
    from lightning.fabric import Fabric

    from cgx.adapters.lightning import CgxFabricStrategy

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cgx").addHandler(handler)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=CgxFabricStrategy("uniform:4"))
    fabric.launch()
    model = fabric.setup(mlp())
    fabric.save(folder / "state.ckpt", {"model": model})
    fabric.barrier()
    for path in folder.glob("*.cgx-*.pt"):
        path.unlink(missing_ok=True)
    fabric.barrier()
    fabric.load(folder / "state.ckpt", {"model": model})
    model(torch.ones(2, 64)).sum().backward()
    return told


def test_a_checkpoint_made_without_cgx_is_no_error(tmp_path: Path) -> None:
    (first,), rest = run_processes(without_a_state, 2, tmp_path, timeout_seconds=110.0)
    assert "made without cgx" in first
    assert rest == []
