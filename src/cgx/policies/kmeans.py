"""Clusters layers by size and gradient norm, and gives each cluster its own spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.policies.base import Table, find_equal_layers
from cgx.policies.features import explain_missing, standardise
from cgx.policies.repair import find_ladder, place, repair


@final
@dataclass(frozen=True, slots=True)
class KMeans:
    """As many clusters as candidates; the larger and weaker a cluster's layers, the fewer its bits.

    The guess is repaired cluster by cluster, so that layers alike have one spec as long as that is possible, then by
    single layers, which spend what the clusters left of the budget.

    Args:
        seed: Of the first centres.

    References:
        CGX (arXiv 2111.08617), section 5; the constants are this project's.
    """

    seed: int = 0

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``.

        Raises:
            CgxError: scikit-learn is not installed.
        """
        try:
            from sklearn.cluster import KMeans as Clustering
        except ModuleNotFoundError as error:
            raise explain_missing("KMeans", error) from error
        points = standardise(table)
        count = min(len(find_ladder(table)), len(np.unique(points, axis=0)))
        fitted = Clustering(count, random_state=self.seed, n_init=10).fit(points)
        size, norm = fitted.cluster_centers_.T
        clusters = fitted.labels_.astype(np.int64)
        order = np.argsort(np.argsort(norm - size, kind="stable"), kind="stable")
        positions = order[clusters] / max(count - 1, 1)
        found = repair(table, place(table, positions), max_error, groups=clusters)
        # A layer's group is numbered within its cluster's: equal layers were equal points.
        found = repair(table, found, max_error, groups=find_equal_layers(table))
        return tuple(found.tolist())
