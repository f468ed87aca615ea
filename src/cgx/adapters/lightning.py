"""Lightning and Fabric: DDP strategies that compress, on CPUs as well, and a callback for loggers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.adapters.files import load_from_beside, remove_beside, save_beside
from cgx.core.plan import How
from cgx.torch.ddp import compress
from cgx.torch.handle import Handle


class CgxStrategy(DDPStrategy):
    """``Trainer(strategy=CgxStrategy("auto"))``: DDP with compressed gradients.

    Beside each checkpoint every rank writes ``<checkpoint>.cgx-<rank>.pt``, and reads it where training goes on.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        ddp: As for ``DDPStrategy``.

    Attributes:
        handle: Of the model; None before ``fit`` has wrapped it.
    """

    strategy_name = "cgx"

    def __init__(self, how: How = "auto", options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.how, self.options = how, dict(options or {})
        self.handle: Handle | None = None
        self._resume_from: Path | None = None

    def configure_ddp(self) -> None:
        """Wraps the model, and compresses it."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.handle = compress(self.model, self.how, **self.options)
        if self._resume_from is not None:  # Lightning reads the checkpoint before it wraps the model
            load_from_beside(self.handle, partial(_path, self._resume_from))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint, and every rank's state beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.handle is not None:
            save_beside(self.handle, partial(_path, Path(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the checkpoint; the model that is wrapped next goes on from the states beside it."""
        self._resume_from = Path(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the checkpoint, and every rank's state beside it."""
        super().remove_checkpoint(filepath)
        remove_beside(partial(_path, Path(filepath)))


class CgxFabricStrategy(FabricDDP):
    """``Fabric(strategy=CgxFabricStrategy("auto"))``: DDP with compressed gradients.

    Beside each checkpoint every rank writes ``<checkpoint>.cgx-<model>-<rank>.pt``; ``fabric.load`` reads them.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        ddp: As for Fabric's ``DDPStrategy``.

    Attributes:
        handles: Of the models set up so far, in order.
    """

    strategy_name = "cgx"

    def __init__(self, how: How = "auto", options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.how, self.options = how, dict(options or {})
        self.handles: list[Handle] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wraps a model, and compresses it."""
        model: DistributedDataParallel = super().setup_module(module)
        self.handles.append(compress(model, self.how, **self.options))
        return model

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the checkpoint, and every rank's states beside it."""
        super().save_checkpoint(path, *args, **kwargs)
        for at, handle in enumerate(self.handles):
            save_beside(handle, partial(_path_of_model, Path(path), at))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the checkpoint, and this rank's states beside it: models are set up before."""
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        for at, handle in enumerate(self.handles):
            load_from_beside(handle, partial(_path_of_model, Path(path), at))
        return loaded


class CgxMonitor(Callback):
    """Sends ``Report.scalars`` to the trainer's loggers, as often as it logs; the progress bar is left alone."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Called by Lightning after every batch."""
        handle = getattr(trainer.strategy, "handle", None)
        if isinstance(handle, Handle):
            pl_module.log_dict(handle.report().scalars())


def _path(checkpoint: Path, rank: int) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.cgx-{rank}.pt")


def _path_of_model(checkpoint: Path, at: int, rank: int) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.cgx-{at}-{rank}.pt")
