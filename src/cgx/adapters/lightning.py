"""Lightning and Fabric: DDP strategies that compress, on CPUs, and a callback for loggers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.adapters.files import load_from_beside, remove_beside, save_beside
from cgx.core.plan import How
from cgx.torch.ddp import compress
from cgx.torch.handle import Handle

_LOG = logging.getLogger("cgx")


class CgxStrategy(DDPStrategy):
    """``Trainer(strategy=CgxStrategy("auto"))``: DDP with compressed gradients.

    Beside each checkpoint on a disk every rank writes ``<checkpoint>.cgx-<rank>.pt``, and reads it where training
    goes on.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        ddp: As for ``DDPStrategy``.

    Attributes:
        handle: Of the model that was fitted last; None before.
    """

    strategy_name = "cgx"

    def __init__(self, how: How = "auto", options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.how, self.options = how, dict(options or {})
        self.handle: Handle | None = None
        self._resume_from: tuple[Path, int] | None = None

    def configure_ddp(self) -> None:
        """Wraps the model, and compresses it."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.handle = compress(self.model, self.how, **self.options)
        if self._resume_from is not None:  # Lightning reads the checkpoint before it wraps the model
            (checkpoint, step), self._resume_from = self._resume_from, None
            load_from_beside(self.handle, partial(_path, checkpoint), step=step)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint, and every rank's state beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        path = self._local(filepath)
        if self.handle is not None and path is not None:
            save_beside(self.handle, partial(_path, path), step=checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the checkpoint; a fit goes on from the states beside it."""
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        path, module = self._local(checkpoint_path), self.lightning_module
        if path is not None and module is not None and module.trainer.state.fn is TrainerFn.FITTING:
            path, step = Path(os.path.realpath(path)), loaded["global_step"]  # last.ckpt may be a link
            if isinstance(self.model, DistributedDataParallel) and self.handle is not None:
                load_from_beside(self.handle, partial(_path, path), step=step)
            else:
                self._resume_from = path, step
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the checkpoint, and every rank's state beside it."""
        super().remove_checkpoint(filepath)
        path = self._local(filepath)
        if path is not None:
            remove_beside(partial(_path, path))

    def teardown(self) -> None:
        """Ends the connections; the handle's report stays."""
        if self.handle is not None:
            self.handle.remove()
        super().teardown()

    def _local(self, path: Any) -> Path | None:
        if "://" in str(path):
            if self.is_global_zero:
                _LOG.warning("cgx keeps its state beside checkpoints on a disk only: %s gets none", path)
            return None
        return Path(path)


class CgxFabricStrategy(FabricDDP):
    """``Fabric(strategy=CgxFabricStrategy("auto"))``: DDP with compressed gradients.

    Beside each checkpoint every rank writes ``<checkpoint>.cgx-<model>-<rank>.pt``; ``fabric.load`` reads them. Set
    models up before, in the same order as the saved run did.

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
        """Reads this rank's states, and the checkpoint."""
        for at, handle in enumerate(self.handles):
            load_from_beside(handle, partial(_path_of_model, Path(path), at))
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
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
