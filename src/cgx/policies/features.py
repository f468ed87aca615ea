"""Size and gradient norm of layers as points in a plane, for the policies that search there."""

from __future__ import annotations

import numpy as np

from cgx.errors import CgxError
from cgx.policies.base import Floats, Table


def standardise(table: Table) -> Floats:
    """``(log numel, log norm)`` of each layer with mean 0 and deviation 1, shape (layers, 2).

    A norm of zero counts as the least above zero. A coordinate that is equal for all layers is zero.
    """
    norms = np.array([layer.norm for layer in table.layers])
    least = norms[norms > 0].min(initial=1.0 if not (norms > 0).any() else np.inf)
    sizes = [max(layer.numel, 1) for layer in table.layers]
    points = np.log(np.stack([sizes, np.maximum(norms, least)], axis=1))
    points -= points.mean(axis=0)
    spread = points.std(axis=0)
    standard: Floats = np.where(spread > 1e-12, points / np.where(spread > 1e-12, spread, 1), 0.0)
    return standard


def explain_missing(policy: str, error: ModuleNotFoundError) -> CgxError:
    """What to say when the package behind a search is not installed."""
    return CgxError(
        f"the policy {policy} needs {error.name}, which is not installed: `pip install 'cgx[adaptive]'`, "
        "or choose LGreco, Linear or BySize, which need nothing more"
    )
