"""Compresses the DDP models of a script that does not call cgx: by the variable ``CGX`` or the backend's name.

Loaded inside of ``import torch`` where the variable is set: what it needs of cgx it imports when a model is made.
"""

from __future__ import annotations

import functools
import logging
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx.core.env import how
from cgx.torch.compat import untraced

_LOG = logging.getLogger("cgx")
_AUTO, _OFF = "auto", "off"
_WATCHED = "_cgx_watches"
_wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()  # by id of what they wrap


def watch() -> None:
    """From here on every DDP model that is made gets a hook, unless the script registers its own.

    That is at the first forward pass whose gradients will be reduced: later than any hook of the script's, and at a
    point that all ranks reach together.
    """
    stock = DistributedDataParallel.__init__
    if hasattr(stock, _WATCHED):
        return

    @functools.wraps(stock)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _wrappers[id(self.module)] = self
        if _wanted(self.process_group) != _OFF:
            self.register_forward_pre_hook(_compress_first)

    setattr(init, _WATCHED, True)
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP model that was made last around a module, if one was since ``watch``."""
    wrapper = _wrappers.get(id(module))
    return wrapper if wrapper is not None and wrapper.module is module else None


def _wanted(group: dist.ProcessGroup) -> str:
    """How a model's gradients travel: as the variable says, else ``auto`` on the backend ``cgx``, else exact.

    Raises:
        SpecError: The variable says nothing that cgx understands.
    """
    asked = how()
    if asked is None:
        return _AUTO if _is_ours(group) else _OFF
    if asked not in (_AUTO, _OFF):
        from cgx.core.plan import to_specs

        to_specs(asked)
    return asked


def _is_ours(group: dist.ProcessGroup) -> bool:
    try:
        return "cgx" in dist.get_backend_config(group)
    except (RuntimeError, TypeError, ValueError):  # a group that torch.distributed has not made
        return False


# At the top of the module and without a closure: a model that waits for its first pass can be copied and pickled.
@untraced
def _compress_first(model: DistributedDataParallel, _: Any) -> None:
    if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
        return
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _compress_first]:
        del hooks[key]
    from cgx.torch.ddp import compress, handle_of

    if handle_of(model) is not None:
        return
    if getattr(model, "_comm_hooks", ()):
        _LOG.info("this DDP model has a communication hook of the script's own; cgx leaves it alone")
        return
    compress(model, _wanted(model.process_group))
