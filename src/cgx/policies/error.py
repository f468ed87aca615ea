"""How far a reduced mean is from the exact one, in the units that one or another optimizer may care about.

Each measure is the mean over elements of ``(error / scale)**2``; they differ in the scale, from one for all elements to
one for each. ``extra_noise`` compares the error with what the exact mean itself is uncertain by.

References:
    McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), for noise and batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
FLOOR = 1e-3  # least scale of a block, as a part of the whole's: elements without gradient must not count for ever


def squared_error(error: Floats) -> float:
    """Absolute squared error ``sum(error**2)``: the measure of CGX (arXiv 2111.08617, section 5).

    Shapes:
        error: (elements,).
    """
    return float(np.einsum("i,i->", error, error, dtype=np.float64))


def relative_error(error: Floats, exact: Floats) -> float:
    """Squared error over the squared norm of ``exact``: the absolute one, in units that steps of training share.

    Example:
        >>> relative_error(np.array([1.0, 0.0]), np.array([6.0, 8.0]))
        0.01
    """
    return _ratio(squared_error(error), squared_error(exact))


def relative_error_by_tensor(error: Floats, exact: Floats, extents: Sequence[slice]) -> float:
    """Mean over elements of the squared error in units of their tensor's mean square.

    That is ``sum_t(numel_t * |error_t|**2 / |exact_t|**2) / numel``. A tensor of zeros counts as one whose root mean
    square is ``FLOOR`` times that of all elements.

    Args:
        error: Shape (elements,).
        exact: Shape (elements,).
        extents: Elements of each tensor; together all elements.
    """
    starts = np.array([extent.start for extent in extents if extent.start < extent.stop], np.int64)
    return _mean_over_runs(error, exact, starts)


def relative_error_by_block(error: Floats, exact: Floats, extents: Sequence[slice], *, block_size: int = 128) -> float:
    """The same in units of their block's mean square; blocks start anew in each tensor, as on the wire."""
    starts = np.concatenate([np.arange(extent.start, extent.stop, block_size) for extent in extents])
    return _mean_over_runs(error, exact, starts)


def step_error(error: Floats, second_moment: Floats, *, eps: float) -> float:
    """Mean over elements of ``(error / (sqrt(v) + eps))**2``: how far the step of Adam is off, all elements alike.

    Its step is ``lr * m / (sqrt(v) + eps)`` and linear in ``m``, so this is the squared error of the step it takes, in
    units of ``lr**2``, had it no momentum. (For plain SGD and for momentum the step's error is ``squared_error``.)

    Args:
        error: Shape (elements,).
        second_moment: Adam's ``v`` with its bias corrected, shape (elements,).
        eps: Adam's.
    """
    return squared_error(error / (np.sqrt(second_moment) + eps)) / error.size


def preconditioned_error(error: Floats, exact: Floats, second_moment: Floats, *, eps: float) -> float:
    """``sum(error**2 / (sqrt(v) + eps)) / sum(exact**2 / (sqrt(v) + eps))``: the relative error in Adam's own norm.

    A step along ``-g / sqrt(v)`` lowers the loss by ``lr * sum(g**2 / sqrt(v))`` to first order, so this weighs what
    is wrong in an element as its gradient is weighed in the progress of training. ``step_error`` instead counts an
    element that contributes nothing like any other.

    Args:
        error: Shape (elements,).
        exact: Shape (elements,).
        second_moment: Adam's ``v`` with its bias corrected, shape (elements,).
        eps: Adam's.
    """
    weight = 1 / np.sqrt(np.sqrt(second_moment) + eps)
    return _ratio(squared_error(error * weight), squared_error(exact * weight))


def sampling_noise(squared_norms: Floats, mean_squared_norm: float) -> float:
    """Estimates the squared error of the mean of ``N`` gradients as an estimate of the true gradient; unbiased.

    Let ``g_r``, r = 1..N, be independent with mean ``G`` and total variance ``s = E|g_r - G|**2``, and ``m`` their
    mean. Then ``E|m - G|**2 = s / N`` is wanted. Since ``E|g_r|**2 = |G|**2 + s`` and ``E|m|**2 = |G|**2 + s / N``,

        E[sum_r |g_r|**2 - N |m|**2] = N |G|**2 + N s - N |G|**2 - s = (N - 1) s,

    and the left side over ``N (N - 1)`` is an unbiased estimate. It needs norms only, of each tensor or of the whole;
    estimates of tensors add up. Its relative standard deviation is about ``sqrt(2 / ((N - 1) d))``, where ``d`` is the
    number of directions that share the variance evenly: average it over steps when ranks are few.

    Args:
        squared_norms: ``|g_r|**2``, shape (ranks,), at least two.
        mean_squared_norm: ``|m|**2``.

    Returns:
        The estimate; below zero only by rounding, when all gradients are equal.

    Example:
        >>> sampling_noise(np.array([1.0, 1.0]), 0.5)  # (1, 0) and (0, 1)
        0.5
    """
    ranks = len(squared_norms)
    return float((np.sum(squared_norms, dtype=np.float64) - ranks * mean_squared_norm) / (ranks * (ranks - 1)))


def extra_noise(error: float, noise: float) -> float:
    """Squared error of compression over the mean's own sampling noise, both absolute; infinite where there is none."""
    return _ratio(error, max(noise, 0.0))


def lost_batch_share(extra: float) -> float:
    """The share of the batch that compression takes away.

    Noise of the mean falls as one over the batch. With ``extra`` times more of it, unbiased and independent, the mean
    is as good as that of ``1 / (1 + extra)`` of the batch.

    Example:
        >>> round(lost_batch_share(0.25), 3)
        0.2
    """
    return 1.0 - 1.0 / (1.0 + extra)


def _mean_over_runs(error: Floats, exact: Floats, starts: NDArray[np.int64]) -> float:
    """Mean over elements of ``(error / scale)**2``, the scale being the root mean square of ``exact`` in their run."""
    if not error.size:
        return 0.0
    wrong = np.add.reduceat(np.square(error, dtype=np.float64), starts)
    right = np.add.reduceat(np.square(exact, dtype=np.float64), starts)
    counts = np.diff(np.append(starts, error.size))
    least = FLOOR**2 * right.sum() / error.size
    units = np.maximum(right / counts, least)
    if not units.any():
        return _ratio(float(wrong.sum()), 0.0)
    return float((wrong / units).sum() / error.size)


def _ratio(part: float, whole: float) -> float:
    if whole > 0:
        return part / whole
    return 0.0 if part == 0 else float("inf")
