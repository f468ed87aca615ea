"""One option per layer, of least cost within a budget of weight: the dynamic program of L-GreCo and Kimad+.

Weights are counted in cells, from each layer's least weight upwards: what every choice must pay is not rounded, so the
lightest choice is always in the program. Rounding up still hides up to one cell per layer, and with it choices that
fit; so the program runs some cells beyond the budget, and of the choices found there the cheapest whose true weight
fits wins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgx.policies.base import Floats, Ints, add_up

_MAX_EXTRA_CELLS = 1000  # that many choices beyond the budget are looked at, at most


def solve(costs: Floats, weights: Floats, max_weight: float, *, cell: float) -> tuple[int, ...] | None:
    """The cheapest choice found, or None when not even the lightest fits.

    Guarantees:
        The sum of weights is at most ``max_weight``. The cost is at most that of any choice that is lighter than
        ``max_weight`` by one cell for each layer, and does not grow with ``max_weight`` at a fixed ``cell``. When
        weights are whole cells the cost is the least possible.

    Args:
        costs: What to minimise, shape (layers, options); infinite for an option that cannot be taken.
        weights: What is limited, at least zero, of the same shape; infinite likewise.
        max_weight: Budget.
        cell: Unit in which weights are counted, above zero.

    Cost:
        layers x options x cells additions and comparisons, and two bytes per layer and cell.

    References:
        L-GreCo (arXiv 2210.17357), algorithm 1; Kimad (arXiv 2312.08053).
    """
    least = weights.min(axis=1)
    room = max_weight - add_up(least.tolist())
    if not room >= 0:
        return None
    within = int(room / cell)
    size = within + 1 + min(len(weights), _MAX_EXTRA_CELLS)
    with np.errstate(over="ignore"):
        counted = np.ceil((weights - least[:, None]) / cell)
    cells = np.minimum(counted, size).astype(np.int64)
    best, picks = _fill(costs, cells, size)
    # The first cell of each cost, from the least cost up: the first of them that fits is the answer.
    for at in np.unique(best, return_index=True)[1].tolist():
        if not np.isfinite(best[at]):
            break
        indices = _trace(picks, cells, at)
        if add_up(weights[layer, option] for layer, option in enumerate(indices)) <= max_weight:
            return indices
    return None


@np.errstate(over="ignore")  # a sum of costs beyond all numbers is a cost like infinity
def _fill(costs: Floats, cells: Ints, size: int) -> tuple[Floats, NDArray[np.int16]]:
    """Least cost by cells spent at most, and the option of each layer behind it."""
    best = np.zeros(size)
    picks = np.zeros((len(cells), size), np.int16)
    for layer, options in enumerate(cells.tolist()):
        reached = np.full(size, np.inf)
        for option, spent in enumerate(options):
            if spent >= size:
                continue
            trial = best[: size - spent] + costs[layer, option]
            is_better = trial < reached[spent:]
            np.copyto(reached[spent:], trial, where=is_better)
            picks[layer, spent:][is_better] = option
        best = reached
    return best, picks


def _trace(picks: NDArray[np.int16], cells: Ints, at: int) -> tuple[int, ...]:
    indices: list[int] = []
    for layer in reversed(range(len(picks))):
        option = int(picks[layer, at])
        indices.append(option)
        at -= int(cells[layer, option])
    return tuple(reversed(indices))
