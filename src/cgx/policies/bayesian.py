"""Bayesian search for the fewest bytes, over how much a layer's size and norm decide about its bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.policies.base import Floats, Table, find_equal_layers
from cgx.policies.features import explain_missing, standardise
from cgx.policies.repair import place, repair

_POOL = 512  # points compared per turn
_LENGTH = 0.3  # of the unit cube: how far a layer's bits change little
_NOISE = 1e-6  # relative variance: sizes jump where a layer changes its spec


@final
@dataclass(frozen=True, slots=True)
class Bayesian:
    """Gaussian process with expected improvement over three numbers that span an assignment, each repaired.

    A layer's place on the ladder is ``a + b * log numel + c * log norm`` (standardised): one number per layer would be
    too many for a budget of some fifty evaluations. Repair keeps every evaluation within the error budget, so no
    penalty is needed.

    Args:
        evaluations: Assignments to try, at least 1.
        seed: Of the points that are compared.

    References:
        CGX (arXiv 2111.08617), section 5; expected improvement: Jones, Schonlau, Welch, 1998.
    """

    evaluations: int = 50
    seed: int = 0

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``.

        Raises:
            CgxError: scikit-learn or SciPy is not installed.
        """
        try:
            from scipy.special import ndtr
            from sklearn.gaussian_process import GaussianProcessRegressor
            from sklearn.gaussian_process.kernels import Matern
        except ModuleNotFoundError as error:
            raise explain_missing("Bayesian", error) from error
        rng, features, groups = np.random.default_rng(self.seed), standardise(table), find_equal_layers(table)
        process = GaussianProcessRegressor(Matern(_LENGTH, nu=2.5), alpha=_NOISE, optimizer=None, normalize_y=True)

        def evaluate(point: Floats) -> tuple[float, tuple[int, ...]]:
            offset, slopes = point[0], point[1:] - 0.5
            found = repair(table, place(table, offset + features @ slopes), max_error, groups=groups)
            indices = tuple(found.tolist())
            # What no repair brings within the budget must not look small.
            return table.nbytes_of(indices) if table.error_of(indices) <= max_error else worst, indices

        def improve() -> Floats:
            pool = rng.random((_POOL, 3))
            mean, deviation = process.fit(np.stack(points), np.array(sizes)).predict(pool, return_std=True)
            gain = min(sizes) - mean
            score = np.where(deviation > 0, gain / np.maximum(deviation, 1e-300), 0.0)
            expected = gain * ndtr(score) + deviation * np.exp(-0.5 * score**2) / np.sqrt(2 * np.pi)
            best: Floats = pool[int(np.argmax(expected))]
            return best

        worst = float(table.nbytes.max(axis=1).sum())
        points: list[Floats] = [np.array([0.5, 0.5, 0.5])]  # the same for all layers
        sizes, choices = [], []
        while True:
            size, indices = evaluate(points[-1])
            sizes.append(size)
            choices.append(indices)
            if len(sizes) >= self.evaluations:
                return choices[int(np.argmin(sizes))]
            points.append(improve())
