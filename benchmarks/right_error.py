"""Which measure of the error of a gradient predicts what the error costs in loss?

Two small models train on 4 virtual ranks: a byte-level GPT with AdamW, and the convolutional net of `cgx demo` with SGD
and momentum, at a fixed rate from where it has settled, on digits of which 30 % bear a label drawn anew each time.
(Otherwise it would learn them by heart, its gradient vanish, and no noise cost anything.) The same seeds train with the
exact mean, through compressed reductions of several specs, and with noise put on the exact mean in several shapes, so
that the measures disagree about what is large:

all      noise of one size for all elements
tensor   in proportion to the root mean square of the element's tensor
block    of its block of 128
adam     to the square root of Adam's second moment

Each run notes the measures of `cgx.policies.error` (means over steps; those with Adam's second moment v take it from
the reduced means, as the optimizer does, or from the exact ones) and its final loss, minus that of the exact run of the
same seed. Conditions are means over seeds. A measure is as good as its rank correlation with that difference, over all
conditions and over the half that costs least, and as R² of the best curve ``difference = a * measure**b``. "Best" is
the share of bootstrap samples of conditions in which its rank correlation was the highest.

    nice -n 10 python benchmarks/right_error.py --json runs.jsonl

takes some 10 minutes on two idle cores; `--from runs.jsonl` prints the tables of runs that were kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import rankdata
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from cgx.cli.demo.models import TASKS, Task
from cgx.cli.demo.models.data import digits, generator
from cgx.cli.demo.models.gpt import ByteGPT
from cgx.policies.error import (
    preconditioned_error,
    relative_error,
    relative_error_by_block,
    relative_error_by_tensor,
    squared_error,
    step_error,
)
from cgx.torch.virtual import Reduced, VirtualGroup

RANKS = 4
BLOCK = 128
DRAWN_LABELS = 0.3  # share
BETA2, EPS = 0.95, 1e-8  # of the GPT's AdamW; for the convolutional net, of the Adam it does not use
EVERY = 4  # steps between two measurements
FIRST = 24  # step measured: before, Adam's second moment is the square of very few gradients
EXACT = "off"
MEASURES = ("absolute", "relative", "per tensor", "per block", "step", "step, exact v", "Adam norm",
            "Adam norm, exact v", "extra noise")  # fmt: skip
SPECS = (
    "uniform:1/block=32", "uniform:1", "uniform:2", "uniform:2/block=1024", "uniform:3/block=32", "uniform:3/block=512",
    "uniform:4", "uniform:4/block=65536", "uniform:6/block=65536",
)  # fmt: skip
# Until the loss shows them.
LEVELS = {
    "gpt": {"all": (0.003, 0.02, 0.1), "tensor": (0.03, 0.1, 0.3), "block": (0.1, 0.3, 1.0), "adam": (0.1, 0.3, 1.0)},
    "convnet": {"all": (1.0, 5.0, 25.0), "tensor": (1.0, 5.0, 25.0), "block": (1.0, 5.0, 25.0),
                "adam": (0.1, 0.3, 1.0)},
}  # fmt: skip
OPTIMIZERS = {"gpt": "AdamW", "convnet": "SGD with momentum"}

Floats = NDArray[np.float64]


def _doubtful_digits(seed: int, rank: int, step: int) -> Any:
    """A batch in which some labels are drawn at random, anew each time: its gradients never vanish."""
    images, labels = TASKS["convnet"].batch(seed, rank, step)
    random = generator(seed, rank, step + 10**6)
    is_drawn = torch.from_numpy(random.random(len(labels)) < DRAWN_LABELS)
    return images, torch.where(is_drawn, torch.from_numpy(random.integers(0, 10, len(labels))), labels)


@torch.no_grad()
def _expected_loss(model: nn.Module) -> float:
    """The exact expectation of what training on `_doubtful_digits` minimises."""
    images, labels, _, _ = digits()
    return float(functional.cross_entropy(model(images), labels, label_smoothing=DRAWN_LABELS))


def _text_loss(model: nn.Module) -> float:
    return TASKS["gpt"].evaluate(model).loss


@final
@dataclass(frozen=True)
class Setup:
    """How a model trains.

    Args:
        task: Model, data, optimizer, and the steps of a run.
        evaluate: The loss of a model.
        exact_steps: Steps with the exact mean before the run begins, at a rate that rises and stays: from random
            weights the convolutional net finds its way the faster the more noise it gets. Then noise has a price.
        evaluations: The final loss is the mean of so many, after each of the last steps.
    """

    task: Task
    evaluate: Callable[[nn.Module], float]
    exact_steps: int = 0
    evaluations: int = 1

    def rate_factor(self, step: int, steps: int) -> float:
        """Return the factor on the peak learning rate at `step`, which is negative before the run."""
        if self.exact_steps:
            return min(1.0, (step + self.exact_steps + 1) / self.task.warm_up_steps)
        return self.task.learning_rate_factor(step, steps)


def setups() -> dict[str, Setup]:
    """Return both models, small enough for many runs."""
    small = replace(TASKS["gpt"], build=lambda: ByteGPT(width=64, layers=2), steps=150)
    convnet = replace(TASKS["convnet"], batch=_doubtful_digits, steps=80)
    return {
        "gpt": Setup(small, _text_loss),
        "convnet": Setup(convnet, _expected_loss, exact_steps=150, evaluations=20),
    }


@final
@dataclass(frozen=True)
class Run:
    """What to train: a model, a seed, and a spec or `noise:SHAPE:LEVEL`."""

    model: str
    how: str
    seed: int
    steps: int


@final
class Noise:
    """Noise of a shape and a relative power, put on the exact mean."""

    def __init__(self, shape: str, level: float, seed: int) -> None:
        self.shape, self.level, self._random = shape, level, np.random.default_rng((seed, 77))

    def __call__(self, reduced: Reduced, second_moment: Floats) -> Floats:
        """Return the error to add."""
        exact, extents = reduced.exact, list(reduced.extents.values())
        match self.shape:
            case "all":
                size: Any = np.sqrt(np.mean(exact**2))
            case "tensor":
                size = _rms(exact, np.array([e.start for e in extents]))
            case "block":
                size = _rms(exact, np.concatenate([np.arange(e.start, e.stop, BLOCK) for e in extents]))
            case _:
                size = np.sqrt(second_moment)
        return self._random.standard_normal(exact.size) * np.sqrt(self.level) * size


def _rms(exact: Floats, starts: NDArray[np.int64]) -> Floats:
    counts = np.diff(np.append(starts, exact.size))
    return np.repeat(np.sqrt(np.add.reduceat(exact**2, starts) / counts), counts)


@cache
def _start(model_name: str, seed: int) -> tuple[nn.Module, Optimizer]:
    """Return the model as runs find it, with its optimizer; to be copied."""
    setup = setups()[model_name]
    torch.manual_seed(seed)
    model = setup.task.build()
    optimizer = setup.task.optimizer(model)
    group = VirtualGroup(model, RANKS, EXACT)
    peaks = [parameters["lr"] for parameters in optimizer.param_groups]
    for step in range(-setup.exact_steps, 0):
        _set_rate(optimizer, peaks, setup.rate_factor(step, 1))
        group.backward(setup.task.loss, _batches(setup, seed, step))
        optimizer.step()
    _set_rate(optimizer, peaks, 1.0)
    return model, optimizer


def _set_rate(optimizer: Optimizer, peaks: Sequence[float], factor: float) -> None:
    for parameters, peak in zip(optimizer.param_groups, peaks, strict=True):
        parameters["lr"] = peak * factor


def _batches(setup: Setup, seed: int, step: int) -> list[Any]:
    return [setup.task.batch(seed, rank, step + setup.exact_steps) for rank in range(RANKS)]


def train(run: Run) -> dict[str, Any]:
    """Train one model; return its final loss and the mean of each measure."""
    torch.set_num_threads(1)
    start = time.monotonic()
    setup = setups()[run.model]
    model, optimizer = deepcopy(_start(run.model, run.seed))  # together: the copies belong to each other
    peaks = [group["lr"] for group in optimizer.param_groups]
    is_noise = run.how.startswith("noise:")
    group = VirtualGroup(model, RANKS, EXACT if is_noise else run.how, seed=run.seed)
    noise = None
    if is_noise:
        _, shape, level = run.how.split(":")
        noise = Noise(shape, float(level), run.seed)
    second: Floats = np.zeros(sum(p.numel() for p in model.parameters()))
    second_of_exact = second
    seen: dict[str, list[float]] = defaultdict(list)
    losses = []
    for step in range(run.steps):
        _set_rate(optimizer, peaks, setup.rate_factor(step, run.steps))
        reduced = group.backward(setup.task.loss, _batches(setup, run.seed, step))
        if noise is not None:
            before = reduced.exact**2 if step == 0 else second / (1 - BETA2**step)
            reduced.mean[:] = reduced.exact + noise(reduced, before)
            _put_in_grad(model, reduced)
        second = BETA2 * second + (1 - BETA2) * reduced.mean.astype(np.float64) ** 2
        second_of_exact = BETA2 * second_of_exact + (1 - BETA2) * reduced.exact**2
        bias = 1 - BETA2 ** (step + 1)
        if step >= FIRST and step % EVERY == 0 and run.how != EXACT:
            for name, value in _measure(reduced, second / bias, second_of_exact / bias).items():
                seen[name].append(value)
        optimizer.step()
        if step >= run.steps - setup.evaluations:
            losses.append(setup.evaluate(model))
    found = {name: float(np.mean(values)) for name, values in seen.items()}
    if found:  # a ratio of means: single estimates of the noise are unsure
        found["extra noise"] = found["absolute"] / found.pop("noise")
    return {
        "model": run.model, "how": run.how, "seed": run.seed, "steps": run.steps, "loss": float(np.mean(losses)),
        "measures": found, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def _put_in_grad(model: nn.Module, reduced: Reduced) -> None:
    for (_, parameter), extent in zip(model.named_parameters(), reduced.extents.values(), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.from_numpy(reduced.mean[extent]).view(parameter.shape))


def _measure(reduced: Reduced, second_moment: Floats, second_of_exact: Floats) -> dict[str, float]:
    error, exact, extents = reduced.error, reduced.exact, list(reduced.extents.values())
    return {
        "absolute": squared_error(error),
        "relative": relative_error(error, exact),
        "per tensor": relative_error_by_tensor(error, exact, extents),
        "per block": relative_error_by_block(error, exact, extents, block_size=BLOCK),
        "step": step_error(error, second_moment, eps=EPS),
        "step, exact v": step_error(error, second_of_exact, eps=EPS),
        "Adam norm": preconditioned_error(error, exact, second_moment, eps=EPS),
        "Adam norm, exact v": preconditioned_error(error, exact, second_of_exact, eps=EPS),
        "noise": reduced.sampling_noise,
    }


def runs_of(models: Sequence[str], seeds: int, steps: int | None) -> list[Run]:
    """Return all runs, seed by seed, so that an interrupted series can be used."""
    made = []
    for seed in range(seeds):
        for model in models:
            noises = [f"noise:{shape}:{level}" for shape, levels in LEVELS[model].items() for level in levels]
            count = steps or setups()[model].task.steps
            made += [Run(model, how, seed, count) for how in (EXACT, *SPECS, *noises)]
    return made


def _fit(x: Floats, y: Floats) -> float:
    """Return R² of the best curve `a * x**b` through the origin."""
    best = -np.inf
    for power in np.linspace(0.2, 2, 37):
        curve = (x / x.max()) ** power
        rest = y - curve * (curve @ y) / (curve @ curve)
        best = max(best, 1 - float(rest @ rest) / float(np.sum((y - y.mean()) ** 2) or 1))
    return best


def _correlation(x: Floats, y: Floats) -> float:
    """Return the rank correlation, 0 where all values are equal."""
    a, b = (values - values.mean() for values in (rankdata(x), rankdata(y)))
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm else 0.0


def print_tables(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the conditions of each model, and how well each measure predicts."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        exact = {row["seed"]: row["loss"] for row in mine if row["how"] == EXACT}
        by_how: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in mine:
            if row["how"] != EXACT and row["seed"] in exact:
                by_how[row["how"]].append(row)
        y = np.array([np.mean([r["loss"] - exact[r["seed"]] for r in some]) for some in by_how.values()])
        spread = [np.std([r["loss"] - exact[r["seed"]] for r in some]) for some in by_how.values()]
        x = {m: np.array([np.mean([r["measures"][m] for r in s]) for s in by_how.values()]) for m in MEASURES}
        table = Table("condition", "loss difference", *MEASURES, title=_title(model, exact))
        for i in np.argsort(y):
            table.add_row(
                list(by_how)[i], f"{y[i]:+.4f} ± {spread[i]:.4f}", *(f"{x[m][i]:.3g}" for m in MEASURES)
            )  # fmt: skip
        console.print(table)
        console.print(_verdict(model, x, y))


def _title(model: str, exact: dict[int, float]) -> str:
    losses = ", ".join(f"{loss:.4f}" for loss in exact.values())
    return f"{model}, {OPTIMIZERS[model]}, {RANKS} virtual ranks; exact loss by seed {losses}"


def _verdict(model: str, x: dict[str, Floats], y: Floats) -> Table:
    random = np.random.default_rng(0)
    samples = [random.integers(0, len(y), len(y)) for _ in range(1000)]
    drawn = {m: np.array([_correlation(x[m][s], y[s]) for s in samples]) for m in MEASURES}
    best = np.argmax([drawn[m] for m in MEASURES], axis=0)
    small = np.argsort(y)[: -(-len(y) // 2)]
    table = Table(
        "measure",
        "rank correlation",
        "95 %",
        "cheap half",
        "R² of a curve",
        "best",
        title=f"{model}: {OPTIMIZERS[model]}",
    )
    for i, m in enumerate(MEASURES):
        low, high = np.percentile(drawn[m], [2.5, 97.5])
        table.add_row(
            m, f"{_correlation(x[m], y):.3f}", f"{low:.2f} to {high:.2f}",
            f"{_correlation(x[m][small], y[small]):.3f}", f"{_fit(x[m], y):.3f}", f"{np.mean(best == i):.0%}",
        )  # fmt: skip
    return table


def _trained(runs: Sequence[Run], jobs: int) -> Iterator[dict[str, Any]]:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(train, runs)


def main(arguments: Sequence[str]) -> int:
    """Train what is asked for, or read it, and print the tables."""
    parser = argparse.ArgumentParser(description="Which measure of error predicts the loss?")
    parser.add_argument("--models", default="gpt,convnet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every run; by default each model's own")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="where to keep one object for each run")
    parser.add_argument("--from", dest="kept", type=Path, help="runs that were kept, instead of new ones")
    asked = parser.parse_args(arguments)
    console = Console(width=180)
    if asked.kept is not None:
        rows = [json.loads(line) for line in asked.kept.read_text().splitlines()]
    else:
        rows = []
        for row in _trained(runs_of(asked.models.split(","), asked.seeds, asked.steps), asked.jobs):
            rows.append(row)
            if asked.json is not None:
                with asked.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print_tables(rows, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
