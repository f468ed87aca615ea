"""Kimad+: the least error within a byte budget, the dual of L-GreCo, and the budget that a bandwidth gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from cgx.errors import SpecError
from cgx.policies.base import Choice, Table, check_previous, find_fault, make_choice
from cgx.policies.knapsack import solve


@final
@dataclass(frozen=True, slots=True)
class KimadPlus:
    """The most accurate choice that fits a byte budget, up to the resolution of the size axis.

    Args:
        cells: Resolution, above zero: one cell is that part of the distance between the smallest and the largest
            choice, at least a byte. It does not depend on the budget, so a larger budget never has the larger error.

    References:
        Kimad (arXiv 2312.08053), section 3.3.
    """

    cells: int = 1000

    def choose(self, table: Table, max_nbytes: float, *, previous: Sequence[int] | None = None) -> Choice:
        """The choice for a byte budget.

        Guarantees:
            When any choice fits ``max_nbytes``, the result does; when none does, it is the smallest choice. Its error
            is at most that of the default and of the previous choice, whichever fit. A table that nothing can be read
            from keeps the previous choice, else the default, when it fits, else the smallest.

        Args:
            table: What to choose from.
            max_nbytes: Bytes that a rank may send, both phases together.
            previous: The choice in use.

        Raises:
            SpecError: The budget is not a number of at least zero, or ``previous`` belongs to another table.
        """
        if not max_nbytes >= 0:
            raise SpecError(f"a byte budget is a number of at least zero, found {max_nbytes!r}")
        check_previous(table, previous)
        options: list[tuple[Sequence[int] | None, str]] = [
            (previous, "nothing more accurate than the previous choice was found within the byte budget"),
            (table.default_choice, "nothing more accurate than the default was found within the byte budget"),
            (_find_smallest(table), "the smallest choice: nothing more accurate was found within the byte budget"),
        ]
        if fault := find_fault(table):
            options = [
                (indices, f"the first of previous, default and smallest that fits: {fault}") for indices, _ in options
            ]
        else:
            options.append((self._propose(table, max_nbytes), "least error found within the byte budget"))
        found = [
            replace(make_choice(table, indices, math.inf, reason), fits=table.nbytes_of(indices) <= max_nbytes)
            for indices, reason in options
            if indices is not None
        ]
        fitting = [choice for choice in found if choice.fits]
        if not fitting:
            smallest = min(found, key=lambda choice: choice.nbytes)
            reason = f"no choice is within the budget of {max_nbytes:.0f} bytes: the smallest has {smallest.nbytes}"
            return replace(smallest, reason=reason)
        return fitting[0] if fault else min(fitting, key=lambda choice: (choice.error, choice.nbytes))

    def _propose(self, table: Table, max_nbytes: float) -> Sequence[int] | None:
        nbytes, errors = table.nbytes.astype(np.float64), table.errors
        largest, smallest = (float(each.sum()) for each in (nbytes.max(axis=1), nbytes.min(axis=1)))
        return solve(errors, nbytes, min(max_nbytes, largest), cell=max(1.0, (largest - smallest) / self.cells))


def _find_smallest(table: Table) -> tuple[int, ...]:
    """The fewest bytes of each layer, of candidates that serve it where there are any."""
    errors = table.errors
    is_usable = np.isfinite(errors) | ~np.isfinite(errors).any(axis=1, keepdims=True)
    return tuple(np.where(is_usable, table.nbytes, np.iinfo(np.int64).max).argmin(axis=1).tolist())


def find_byte_budget(bandwidth_byte_s: float, *, target_s: float, compute_s: float) -> float:
    """Bytes that a rank can send in what the computation leaves of a step, at least zero.

    Args:
        bandwidth_byte_s: Bytes per second that a rank gets through, the least of all ranks.
        target_s: What a step may take.
        compute_s: What it takes without communication.

    Example:
        >>> find_byte_budget(1e8, target_s=0.5, compute_s=0.25)
        25000000.0
        >>> find_byte_budget(1e8, target_s=0.2, compute_s=0.25)
        0.0

    References:
        Kimad (arXiv 2312.08053), section 3.2.
    """
    return max(0.0, bandwidth_byte_s * (target_s - compute_s))
