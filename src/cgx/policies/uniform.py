"""One spec for all layers: the smallest that keeps the error budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from cgx.policies.base import Table


@final
@dataclass(frozen=True, slots=True)
class SameForAll:
    """The same candidate for every layer: what adaptive policies are compared with."""

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """See ``Policy.propose``; None when no single candidate keeps the budget."""
        choices = [(i,) * len(table.layers) for i in range(len(table.candidates))]
        fitting = [choice for choice in choices if table.error_of(choice) <= max_error]
        return min(fitting, key=lambda choice: (table.nbytes_of(choice), table.error_of(choice)), default=None)
