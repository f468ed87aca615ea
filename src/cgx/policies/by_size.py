"""The larger a layer, the fewer bytes per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.policies.base import Table, find_equal_layers
from cgx.policies.repair import place, repair


@final
@dataclass(frozen=True, slots=True)
class BySize:
    """Linear in the logarithm of the size: fewest bits for the largest layer, most for the smallest; then repaired."""

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``."""
        sizes = np.log([max(layer.numel, 1) for layer in table.layers])
        width = np.ptp(sizes)
        positions = (sizes.max() - sizes) / (width if width > 0 else 1.0)
        found = repair(table, place(table, positions), max_error, groups=find_equal_layers(table))
        return tuple(found.tolist())
