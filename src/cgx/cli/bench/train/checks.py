"""How far the gradient that a contender averages may be off, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cgx.cli.bench.fidelity import allowed_nmse, norm
from cgx.cli.bench.train.hows import FP16, OFF, coarsest_specs, is_cgx
from cgx.core.plan import Parameter, choose_specs

Gradient = Mapping[str, Tensor]

# Adding in fp32 rounds to 2**-24 of what is added; a kernel of another thread may add up a batch in another order.
_ALLOWED_FP32 = 1e-11
_FP16_STEP, _FP16_SMALLEST = 2.0**-11, 2.0**-25  # half a unit in the last place: of normal numbers, and of the others


def exact_mean(local: Gradient) -> dict[str, Tensor]:
    """The mean over the ranks, summed in double precision and kept in single; collective."""
    found = {}
    for name, own in local.items():
        total = own.double()
        dist.all_reduce(total)
        found[name] = (total / dist.get_world_size()).float()
    return found


def gradient_nmse(found: Gradient, exact: Gradient) -> float:
    """Relative squared error of a whole gradient; NaN stays NaN."""
    squares = sum(float((found[name].double() - mean.double()).square().sum()) for name, mean in exact.items())
    return squares / _norm(exact) ** 2


def allowed_gradient_nmse(how: str, local: Gradient, exact: Gradient) -> float | None:
    """The largest relative squared error that a correct mean can have; None where nobody says. Collective.

    Args:
        how: How it was averaged.
        local: This rank's own gradient.
        exact: The mean of all ranks'.
    """
    if how == OFF:
        return _ALLOWED_FP32
    if how == FP16:
        # Every rank casts and divides, then as many are added: each rounds, relative to what lies there.
        roundings = dist.get_world_size() + 1
        lost = _FP16_STEP * _mean_over_ranks(_norm(local)) + _FP16_SMALLEST * math.sqrt(_numel(exact))
        return (roundings * lost / _norm(exact)) ** 2
    if not is_cgx(how):
        return None
    squares = sum(_mean_over_ranks(loss) ** 2 for loss in _largest_losses(how, local, exact))
    return squares / _norm(exact) ** 2 + _ALLOWED_FP32


def _largest_losses(how: str, local: Gradient, exact: Gradient) -> Iterator[float]:
    """Norm of the error of each parameter, if every rank's own gradient were like this rank's.

    The bound grows linearly with what phase one loses, the mean of the ranks' losses; so the mean of these over the
    ranks is the bound, and no rank needs the others' gradients.
    """
    parameters = [Parameter(name, tuple(mean.shape), "fp32") for name, mean in exact.items()]
    for name, specs in choose_specs(coarsest_specs(how), parameters).items():
        mean = _flat(exact[name]).astype(np.float64)
        size = norm(mean)
        yield size * math.sqrt(allowed_nmse(specs, [_flat(local[name])], mean)) if size > 0 else 0.0


def _mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    return np.asarray(tensor.reshape(-1).numpy())


def _norm(gradient: Gradient) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in gradient.values()))


def _numel(gradient: Gradient) -> int:
    return sum(part.numel() for part in gradient.values())
