"""accelerate: a kwargs handler that compresses the models which ``accelerator.prepare`` wraps in DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.adapters.files import load_from_beside, save_beside
from cgx.core.plan import How
from cgx.errors import SpecError
from cgx.torch.ddp import compress
from cgx.torch.handle import Handle


class CgxKwargs(DistributedDataParallelKwargs):
    """Compresses every model that an ``Accelerator`` wraps in DDP, on CPUs.

    ``accelerator.save_state`` then writes ``cgx-<model>-<rank>.pt`` on every rank, ``load_state`` reads them.

    An ``Accelerator`` takes no handler of a class that it does not know, so this one attaches itself.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        ddp: Arguments of DistributedDataParallel, as for ``DistributedDataParallelKwargs``.

    Raises:
        SpecError: A ``comm_hook`` is given: DDP allows one hook.

    Example:
        ::

            accelerator = Accelerator()
            handler = CgxKwargs("auto").attach(accelerator)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            ...
            accelerator.log({"loss": loss, **handler.scalars()}, step=step)
    """

    def __init__(self, how: How = "auto", options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        if self.comm_hook is not DDPCommunicationHookType.NO:
            raise SpecError(
                f"DDP allows one hook, and comm_hook={self.comm_hook} is asked for beside cgx: leave it out"
            )
        self.how, self.options = how, dict(options or {})
        self._handles: WeakKeyDictionary[DistributedDataParallel, Handle] = WeakKeyDictionary()

    @property
    def handles(self) -> list[Handle]:
        """Of the models that were wrapped and still are in use, in order."""
        return list(self._handles.values())

    def attach(self, accelerator: Accelerator) -> CgxKwargs:
        """Becomes the accelerator's handler for DDP; call it before ``prepare``.

        With one process, or where ``prepare`` wraps models in something else than DDP, nothing is compressed.

        Raises:
            SpecError: The accelerator has a handler for DDP.
        """
        if accelerator.ddp_handler is not None:
            raise SpecError(
                "this Accelerator has DistributedDataParallelKwargs already, which this handler replaces; pass their "
                "arguments to CgxKwargs, like CgxKwargs('auto', find_unused_parameters=True)"
            )
        accelerator.ddp_handler = self
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        return self

    def to_dict(self, ignore_keys: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of DDP alone."""
        names = DistributedDataParallelKwargs().to_dict()
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by accelerate for every model it has wrapped."""
        self._handles[model] = compress(model, self.how, **self.options)

    def scalars(self) -> dict[str, float]:
        """What ``Report.scalars`` has, for ``accelerator.log``; of the second model on, names carry its number."""
        found = [handle.report().scalars() for handle in self.handles]
        return {
            name if at == 0 else name.replace("cgx/", f"cgx/{at}/"): value
            for at, scalars in enumerate(found)
            for name, value in scalars.items()
        }

    def _save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        for path_of, handle in self._places(models, output_dir):
            save_beside(handle, path_of)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        for path_of, handle in self._places(models, input_dir):
            load_from_beside(handle, path_of)

    def _places(self, models: list[nn.Module], folder: str) -> Iterator[tuple[Callable[[int], Path], Handle]]:
        # accelerate keeps the model as it was before DDP, or as a compiler wrapped it.
        handles = {id(model.module): handle for model, handle in self._handles.items()}
        for at, model in enumerate(models):
            inner = getattr(model, "_orig_mod", model)
            inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
            if id(inner) in handles:
                yield partial(_path, folder, at), handles[id(inner)]


def _path(folder: str, at: int, rank: int) -> Path:
    return Path(folder, f"cgx-{at}-{rank}.pt")
