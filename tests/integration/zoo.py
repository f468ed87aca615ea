"""Models of every ordinary and odd kind, each with a batch, for DDP with compressed gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@final
@dataclass(frozen=True)
class Animal:
    """A model and how to use it.

    Args:
        build: Makes the module; the same on all ranks.
        batch: `(rank, step)` to the input.
        ddp: Options of DistributedDataParallel.
        steps: Backward passes; the second one meets rebuilt buckets.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any] = lambda rank, step: torch.randn(8, 64, generator=generator(rank, step))
    ddp: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3


def generator(*words: int) -> torch.Generator:
    """Return a generator that depends on the words alone."""
    return torch.Generator().manual_seed(hash(words) % 2**31)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return compressible layers with vectors between them."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    ).to(dtype)


class InDtype(nn.Module):
    """A module that works in another dtype than its inputs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.to(self.dtype)).abs().float()


class Tied(nn.Module):
    """Two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.body = nn.Embedding(300, 64), nn.Linear(64, 300, bias=False), nn.Linear(64, 64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


class Several(nn.Module):
    """Layers of many dtypes side by side."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
        self.parts = nn.ModuleList(InDtype(nn.Linear(64, 64), dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)


class Unused(nn.Module):
    """Branches that no rank uses, and one that takes turns."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.sometimes = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, uses_it = batch
        return self.sometimes(self.used(x)) if uses_it else self.used(x)


class Shapes(nn.Module):
    """An empty parameter, a scalar, a vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.vector = nn.Parameter(torch.ones(64))
        self.matrix = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.vector) @ self.matrix * self.scalar + self.empty.sum()


class Sparse(nn.Module):
    """An embedding with sparse gradients in front of dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.EmbeddingBag(300, 64, sparse=True), mlp()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(64, 64), mlp(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


class Recurrent(nn.Module):
    """Weights used once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(64, 32, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.view(2, 4, 64))[0]


def _frozen() -> nn.Module:
    model = mlp()
    model[3].weight.requires_grad_(False)
    return model


def _conv() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3))
    return layers.to(memory_format=torch.channels_last)


def _images(rank: int, step: int) -> Tensor:
    images = torch.randn(4, 3, 12, 12, generator=generator(rank, step))
    return images.contiguous(memory_format=torch.channels_last)


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 300, (4, 16), generator=generator(rank, step))


def _taking_turns(rank: int, step: int) -> tuple[Tensor, bool]:
    return torch.randn(8, 64, generator=generator(rank, step)), step % 2 == 0 and rank == 0


SMALL_BUCKETS = {"bucket_cap_mb": 0.02}
ZOO: dict[str, Animal] = {
    "plain": Animal(mlp),
    "small buckets": Animal(mlp, ddp=SMALL_BUCKETS),
    "bucket views": Animal(mlp, ddp={"gradient_as_bucket_view": True}),
    "small bucket views": Animal(mlp, ddp={"gradient_as_bucket_view": True, **SMALL_BUCKETS}),
    "static graph": Animal(mlp, ddp={"static_graph": True}),
    "static graph, small buckets": Animal(mlp, ddp={"static_graph": True, **SMALL_BUCKETS}),
    "tied": Animal(Tied, _tokens),
    "frozen": Animal(_frozen),
    "unused": Animal(Unused, _taking_turns, {"find_unused_parameters": True}),
    "unused, bucket views": Animal(
        Unused, _taking_turns, {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
    "fp64": Animal(lambda: InDtype(mlp(), torch.float64)),
    "fp16": Animal(lambda: InDtype(mlp(), torch.float16)),
    "bf16": Animal(lambda: InDtype(mlp(), torch.bfloat16)),
    "complex64": Animal(lambda: InDtype(nn.Linear(64, 64), torch.complex64)),
    "complex128": Animal(lambda: InDtype(nn.Linear(64, 64), torch.complex128)),
    "several dtypes": Animal(Several),
    "several dtypes, small buckets": Animal(Several, ddp=SMALL_BUCKETS),
    "sparse embedding": Animal(Sparse, _tokens),
    "empty and scalar": Animal(Shapes),
    "channels last": Animal(_conv, _images),
    "checkpointed": Animal(lambda: Checkpointed(use_reentrant=False)),
    "checkpointed, reentrant": Animal(lambda: Checkpointed(use_reentrant=True), ddp={"static_graph": True}),
    "recurrent": Animal(Recurrent),
    "vectors only": Animal(lambda: nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64))),
    "many pieces": Animal(lambda: nn.Sequential(nn.Linear(64, 3000), nn.Linear(3000, 400)), steps=2),
}
