"""Brings a first guess within its error budget and spends what is left of it, greedily."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cgx.policies.base import Floats, Ints, Table

_ROUNDING = 1 - 1e-12  # sums here are in another order than those that judge the result


@np.errstate(over="ignore")  # a sum beyond all numbers is infinite: a candidate that does not serve all
def find_ladder(table: Table) -> list[int]:
    """Candidates that serve all layers, from the fewest bytes in total to the most.

    Those that cost no less than another and lose no less in total are left out.
    """
    nbytes, errors = table.nbytes.sum(axis=0), table.errors.sum(axis=0)
    rungs: list[int] = []
    for candidate in sorted(range(len(nbytes)), key=lambda i: (nbytes[i], errors[i])):
        if errors[candidate] < (errors[rungs[-1]] if rungs else np.inf):
            rungs.append(candidate)
    return rungs


def place(table: Table, positions: Floats) -> Ints:
    """Candidates by position on the ladder, 0 (fewest bytes) to 1 (most); shape (layers,)."""
    ladder = np.array(find_ladder(table), np.int64)
    chosen: Ints = ladder[np.rint(np.clip(positions, 0, 1) * (len(ladder) - 1)).astype(np.int64)]
    return chosen


def repair(table: Table, start: Sequence[int] | Ints, max_error: float, *, groups: Ints) -> Ints:
    """The guess, more accurate where the budget demands it and smaller where it allows it.

    While the error is above the budget, the group for which accuracy is cheapest (bytes per error) gets more; then,
    while anything fits, the one that saves most bytes for the error it adds gets less.

    Guarantees:
        Within the budget if the most accurate choice is, up to rounding. Layers of a group that start equal end equal.

    Shapes:
        start, groups: (layers,).

    Args:
        table: What to choose from.
        start: Candidate of each layer; equal within a group.
        max_error: Budget.
        groups: Number of each layer's group, from zero.

    Cost:
        At most 2 x groups x candidates turns, each of as many operations.
    """
    count = int(groups.max()) + 1
    nbytes, errors = (np.zeros((count, len(table.candidates))) for _ in range(2))
    with np.errstate(over="ignore"):
        np.add.at(nbytes, groups, table.nbytes)
        np.add.at(errors, groups, table.errors)
    current = np.zeros(count, np.int64)
    current[groups] = start
    limit, rows = max_error * _ROUNDING, np.arange(count)

    def move(price: Floats, is_allowed: NDArray[np.bool_]) -> bool:
        # A price can overflow to infinity; the least is taken of those allowed, so each move makes progress.
        allowed = np.flatnonzero(is_allowed)
        if not len(allowed):
            return False
        group, candidate = divmod(int(allowed[price.reshape(-1)[allowed].argmin()]), price.shape[1])
        current[group] = candidate
        return True

    with np.errstate(all="ignore"):
        while errors[rows, current].sum() > limit:
            removed = errors[rows, current][:, None] - errors
            if not move((nbytes - nbytes[rows, current][:, None]) / removed, removed > 0):
                break
        while (slack := limit - errors[rows, current].sum()) >= 0:
            saved, added = nbytes[rows, current][:, None] - nbytes, errors - errors[rows, current][:, None]
            if not move(added / saved, (saved > 0) & (added <= slack)):
                break
    return current[groups]
