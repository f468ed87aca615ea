"""accelerate: a kwargs handler that compresses the models which ``accelerator.prepare`` wraps in DDP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.adapters.files import load_from_beside, save_beside
from cgx.core.plan import How
from cgx.torch.ddp import compress
from cgx.torch.handle import Handle


class CgxKwargs(DistributedDataParallelKwargs):
    """Compresses every model that an ``Accelerator`` wraps in DDP, on CPUs as well.

    ``accelerator.save_state`` then writes ``cgx-<model>-<rank>.pt`` on every rank, ``load_state`` reads them.

    An ``Accelerator`` takes no handler of a class that it does not know, so this one attaches itself.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        ddp: Arguments of DistributedDataParallel, as for ``DistributedDataParallelKwargs``.

    Attributes:
        handles: Of the models wrapped so far, in order.

    Example:
        ::

            accelerator = Accelerator()
            handler = CgxKwargs("auto").attach(accelerator)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            ...
            accelerator.log({"loss": loss, **handler.scalars()}, step=step)
    """

    def __init__(self, how: How = "auto", options: dict[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.how, self.options = how, dict(options or {})
        self.handles: list[Handle] = []

    def attach(self, accelerator: Accelerator) -> CgxKwargs:
        """Becomes the accelerator's handler for DDP; call it before ``prepare``.

        With one process, or where ``prepare`` wraps models in something else than DDP, nothing is compressed.
        """
        accelerator.ddp_handler = self
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        return self

    def to_dict(self, ignore_keys: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of DDP alone."""
        plain = DistributedDataParallelKwargs()
        mine = {name: value for name, value in vars(self).items() if name in vars(plain)}
        return {name: value for name, value in mine.items() if name in plain.to_dict() and name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by accelerate for every model it has wrapped; a hook of its own, ``comm_hook``, goes first."""
        super().register_comm_hook(model)
        self.handles.append(compress(model, self.how, **self.options))

    def scalars(self) -> dict[str, float]:
        """What ``Report.scalars`` has, for ``accelerator.log``; of the second model on, names carry its number."""
        found = [handle.report().scalars() for handle in self.handles]
        return {
            name if at == 0 else name.replace("cgx/", f"cgx/{at}/"): value
            for at, scalars in enumerate(found)
            for name, value in scalars.items()
        }

    def _save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        for at, handle in enumerate(self.handles):
            save_beside(handle, partial(_path, output_dir, at))

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        for at, handle in enumerate(self.handles):
            load_from_beside(handle, partial(_path, input_dir, at))


def _path(folder: str, at: int, rank: int) -> Path:
    return Path(folder, f"cgx-{at}-{rank}.pt")
