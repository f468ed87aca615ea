"""Bits in proportion to a layer's place when layers are sorted by gradient norm per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.policies.base import Table, find_equal_layers
from cgx.policies.repair import place, repair


@final
@dataclass(frozen=True, slots=True)
class Linear:
    """Fewest bits for the lowest ``norm / numel``, most for the highest, evenly in between; then repaired.

    References:
        CGX (arXiv 2111.08617), section 5; the constants are this project's.
    """

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``."""
        scores = np.array([layer.norm / max(layer.numel, 1) for layer in table.layers])
        distinct, ranks = np.unique(scores, return_inverse=True)
        positions = ranks / max(len(distinct) - 1, 1)
        found = repair(table, place(table, positions), max_error, groups=find_equal_layers(table))
        return tuple(found.tolist())
