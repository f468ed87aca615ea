"""One contender on one rank: a DDP replica of the model, its optimizer, and how its gradients are averaged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.cli.bench.train.hows import FP16, is_cgx, powersgd_rank, split_algorithm
from cgx.cli.bench.train.messages import COMPUTE
from cgx.cli.bench.train.workloads import Workload
from cgx.torch.handle import Handle

Batch = tuple[Tensor, Tensor]

_SEED = 0
# PyTorch's PowerSGD dies on Gloo when it has several buckets: this is larger than any model's gradient.
_ONE_BUCKET_MB = 1_000_000
_POWERSGD_START = 2  # the first that its hook allows


@final
class _Loss(nn.Module):
    """A model that returns its mean cross-entropy, which is all that DDP and the loop need to see."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        found: Any = self.model(inputs)
        logits = found if isinstance(found, Tensor) else found.logits
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@final
class Replica:
    """A model in training; every contender starts with the same weights.

    Making one is collective, in an order equal on all ranks.

    Args:
        workload: The model.
        how: How its gradients are averaged; ``compute`` leaves them local.

    Attributes:
        handle: What ``cgx.compress`` returned; None where it was not called.
    """

    def __init__(self, workload: Workload, how: str) -> None:
        torch.manual_seed(_SEED)
        rank = powersgd_rank(how)
        # All ranks drew the same weights; sending them round once more for each contender would take minutes.
        self._ddp = DistributedDataParallel(
            _Loss(workload.build().train()), init_sync=False, bucket_cap_mb=None if rank is None else _ONE_BUCKET_MB
        )
        self._is_synchronised = how != COMPUTE
        self.handle: Handle | None = None
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        if how == FP16:
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif rank is not None:
            self._powersgd = powerSGD_hook.PowerSGDState(
                process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=_POWERSGD_START
            )
            self._ddp.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        elif is_cgx(how) and self._is_synchronised:
            spec, algorithm = split_algorithm(how)
            self.handle = cgx.compress(self._ddp, spec, algorithm=algorithm)
        self._optimizer = workload.optimizer(self._ddp)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes that DDP broadcasts from rank 0 ahead of a synchronised step."""
        return sum(buffer.nbytes for buffer in self._ddp.buffers())

    def step(self, batches: Sequence[Batch]) -> float:
        """Makes one training step of all micro-batches and returns the last one's loss."""
        *local, last = batches
        with self._ddp.no_sync():
            for batch in local:
                self._backward(batch, len(batches))
        with nullcontext() if self._is_synchronised else self._ddp.no_sync():
            loss = self._backward(last, len(batches))
        self._optimizer.step()
        self._optimizer.zero_grad()  # here, not ahead of the step, so that only one contender keeps gradients
        return loss

    def local_gradient(self, batch: Batch) -> dict[str, Tensor]:
        """This rank's own gradient, by parameter; the weights stay as they are."""
        with self._ddp.no_sync():
            self._backward(batch, 1)
        return self._take_gradient()

    def averaged_gradient(self, batch: Batch) -> dict[str, Tensor]:
        """The gradient as this contender averages it, by parameter; the weights stay as they are.

        What PowerSGD lost of former gradients is no part of this one: it is put aside.
        """
        if self._powersgd is not None:
            self._powersgd.error_dict.clear()
        self._backward(batch, 1)
        return self._take_gradient()

    def digest(self) -> str:
        """A hash of all parameters' bits."""
        found = hashlib.blake2b(digest_size=16)
        for name, parameter in self._ddp.named_parameters():
            found.update(name.encode())
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    @torch.no_grad()
    def load_weights_of(self, other: Replica) -> None:
        """Continues from another contender's weights."""
        for own, its in zip(self._ddp.parameters(), other._ddp.parameters(), strict=True):
            own.copy_(its)

    def close(self) -> None:
        """Lets the peers go; collective where compressing was."""
        if self.handle is not None:
            self.handle.remove()

    def _backward(self, batch: Batch, parts: int) -> float:
        loss: Tensor = self._ddp(*batch)
        (loss / parts).backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _take_gradient(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._ddp.module.named_parameters():
            assert parameter.grad is not None, f"{name} takes no part in the loss"
            found[name] = parameter.grad.detach().clone()
        self._optimizer.zero_grad()
        return found
