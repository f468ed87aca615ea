"""A task is all the demo knows about a model: how to build, feed, optimise and judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from cgx.cli.demo.models import data
from cgx.cli.demo.models.convnet import DigitsConvNet
from cgx.cli.demo.models.gpt import CONTEXT, ByteGPT
from cgx.errors import SpecError

Batch: TypeAlias = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats and the share of right answers, on held-out data."""

    loss: float
    accuracy: float


@final
@dataclass(frozen=True)
class Task:
    """One workload of the demo.

    Attributes:
        title: What a person reads.
        steps: Training steps of a full run.
        compute_seconds: What a step costs without communication, on one core of a server of 2023;
            only to tell beforehand how long it will take.
        parameter_count: Elements of the gradient, for the same estimate.
        build: Makes the model; the caller has seeded torch.
        batch: ``(seed, rank, step)`` to the inputs and targets of one rank's step.
        held_out: The fixed validation batches.
        optimizer: Makes the optimizer at its peak learning rate.
        warm_up_steps: Steps over which the learning rate rises to its peak.
    """

    title: str
    steps: int
    compute_seconds: float
    parameter_count: int
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    held_out: Callable[[], list[Batch]]
    optimizer: Callable[[nn.Module], Optimizer]
    warm_up_steps: int

    def learning_rate_factor(self, step: int, steps: int) -> float:
        """Returns the factor on the peak learning rate: a linear rise, then half a cosine."""
        rise = (step + 1) / self.warm_up_steps
        progress = min(1.0, max(0.0, (step - self.warm_up_steps) / max(1, steps - self.warm_up_steps)))
        return min(rise, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of one batch, ready for ``backward``."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judges a model on the held-out data, without communication."""
        loss_sum, right, count = 0.0, 0, 0
        for inputs, targets in self.held_out():
            logits = model(inputs).flatten(0, -2)
            flat = targets.flatten()
            loss_sum += float(functional.cross_entropy(logits, flat, reduction="sum"))
            right += int((logits.argmax(-1) == flat).sum())
            count += flat.numel()
        return Evaluation(loss=loss_sum / count, accuracy=right / count)


_GPT_BATCH = 8
_GPT_HELD_OUT_BATCHES = 16
_GPT_EVALUATION_BATCH = 16
_DIGITS_BATCH = 32


def _text_batch(seed: int, rank: int, step: int) -> Batch:
    text, _ = data.standard_library()
    starts = data.generator(seed, rank, step).integers(0, len(text) - CONTEXT, _GPT_BATCH)
    return data.windows(text, starts, CONTEXT)


def _text_held_out() -> list[Batch]:
    _, text = data.standard_library()
    count = _GPT_HELD_OUT_BATCHES * _GPT_EVALUATION_BATCH
    starts = np.linspace(0, len(text) - CONTEXT - 1, count).astype(np.int64)
    return [data.windows(text, some, CONTEXT) for some in np.split(starts, _GPT_HELD_OUT_BATCHES)]


def _digits_batch(seed: int, rank: int, step: int) -> Batch:
    images, labels, _, _ = data.digits()
    chosen = torch.from_numpy(data.generator(seed, rank, step).integers(0, len(labels), _DIGITS_BATCH))
    return images[chosen], labels[chosen]


def _digits_held_out() -> list[Batch]:
    _, _, images, labels = data.digits()
    return [(images, labels)]


TASKS: dict[str, Task] = {
    "gpt": Task(
        title="byte-level GPT on Python's standard library",
        steps=140,
        compute_seconds=0.15,
        parameter_count=3_229_952,
        build=ByteGPT,
        batch=_text_batch,
        held_out=_text_held_out,
        optimizer=lambda model: AdamW(model.parameters(), lr=7e-4, betas=(0.9, 0.95), weight_decay=0.1),
        warm_up_steps=25,
    ),
    "convnet": Task(
        title="convolutional net on scikit-learn's digits",
        steps=200,
        compute_seconds=0.015,
        parameter_count=356_234,
        build=DigitsConvNet,
        batch=_digits_batch,
        held_out=_digits_held_out,
        optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        warm_up_steps=10,
    ),
}


def find_tasks(names: Iterable[str]) -> dict[str, Task]:
    """Looks up tasks by name, in the order asked for.

    Raises:
        SpecError: There is no such task, or none was named.
    """
    asked = list(dict.fromkeys(names))
    unknown = [name for name in asked if name not in TASKS]
    if unknown or not asked:
        raise SpecError(f"No model {', '.join(unknown) or 'was named'}: have {', '.join(TASKS)}.")
    return {name: TASKS[name] for name in asked}
