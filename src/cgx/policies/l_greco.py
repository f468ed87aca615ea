"""L-GreCo: the fewest bytes within an error budget, by a dynamic program over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.policies.base import Table, add_up
from cgx.policies.knapsack import solve


@final
@dataclass(frozen=True, slots=True)
class LGreco:
    """The smallest choice, up to the resolution of the error axis.

    Args:
        cells: Resolution, above zero. The result is at most as large as the smallest choice for an error budget that
            is less by ``layers / cells``; more cells take proportionally longer.

    References:
        L-GreCo (arXiv 2210.17357); there one cell is ``max_error / cells``, here what the most accurate choice
        leaves of it.
    """

    cells: int = 10_000

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``."""
        errors = table.errors
        room = max_error - add_up(errors.min(axis=1).tolist())
        cell = room / self.cells if np.isfinite(room) else 1.0
        return solve(table.nbytes.astype(np.float64), errors, max_error, cell=cell if cell > 0 else 1.0)
