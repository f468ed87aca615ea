"""The gradients that are reduced: any run of any rank's can be made anew, so nobody has to keep them all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgx.cli.bench.fidelity import Floats, runs

_LAYERS = 24
_SMALLEST, _LARGEST = 1e-4, 1e-2  # standard deviations of layers, as deep nets have them


def make_run(numel: int, rank: int, run: slice) -> Floats:
    """One of the `runs` of a rank's gradient, like a deep net's: normal, layer by layer of its own scale.

    Args:
        numel: Elements of the whole gradient.
        rank: Whose; every rank has other values.
        run: Which elements.
    """
    x: Floats = np.random.default_rng((1, rank, run.start)).standard_normal(run.stop - run.start, np.float32)
    edges = np.linspace(0, numel, _LAYERS + 1).astype(np.int64)
    layers = np.searchsorted(edges, np.arange(run.start, run.stop), side="right") - 1
    ratio = np.random.default_rng(0).random(_LAYERS)
    scales: Floats = (_SMALLEST * (_LARGEST / _SMALLEST) ** ratio).astype(np.float32)
    x *= scales[layers]
    return x


def make_gradient(numel: int, rank: int) -> Floats:
    """A rank's whole gradient, shape (numel,)."""
    gradient = np.empty(numel, np.float32)
    for run in runs(numel):
        gradient[run] = make_run(numel, rank, run)
    return gradient


def exact_mean(numel: int, world_size: int) -> NDArray[np.float64]:
    """Mean of all ranks' gradients in double precision, shape (numel,)."""
    mean = np.zeros(numel)
    for run in runs(numel):
        for rank in range(world_size):
            mean[run] += make_run(numel, rank, run)
    mean /= world_size
    return mean
