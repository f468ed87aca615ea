"""Repair ends, keeps the budget and wastes none of it that a single layer could use."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.policies.base import Table, find_fault, most_accurate
from cgx.policies.repair import find_ladder, place, repair
from tests.policies.tables import CANDIDATES, FOUR, anything, layer_like, model_like, tables


@given(data=st.data(), table=tables(anything), alpha=st.sampled_from([0.5, 1.0, 2.0]))
def test_repair_keeps_the_budget_and_leaves_nothing_that_fits(data: st.DataObject, table: Table, alpha: float) -> None:
    if find_fault(table):
        return
    start = data.draw(st.tuples(*[st.integers(0, len(table.candidates) - 1)] * len(table.layers)))
    budget = min(alpha * table.default_error, sys.float_info.max)
    found = repair(table, start, budget, groups=np.arange(len(start))).tolist()
    error, nbytes = table.error_of(found), table.nbytes_of(found)
    if table.error_of(most_accurate(table)) > budget * (1 - 1e-9):
        return
    assert error <= budget
    for layer in range(len(found)):
        for candidate in range(len(table.candidates)):
            other = [*found[:layer], candidate, *found[layer + 1 :]]
            assert table.nbytes_of(other) >= nbytes or table.error_of(other) > budget * (1 - 1e-9)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310])
def test_prices_that_overflow_do_not_stop_it(tiny: float) -> None:
    """Bytes per error are infinite for all that could be raised: it must still end, with what fits."""
    layers = tuple(replace(layer_like(f"l{i}", 2**20, 1.0), errors=(tiny,) * 3 + (0.0,) * 4) for i in range(3))
    found = repair(Table(CANDIDATES, FOUR, layers), [0, 0, 0], 0.0, groups=np.arange(3))
    assert found.tolist() == [3, 3, 3]


def test_groups_move_together() -> None:
    table = model_like(12)
    groups = np.arange(12) // 4
    found = repair(table, [6] * 12, table.default_error, groups=groups).reshape(3, 4)
    assert (found == found[:, :1]).all()
    assert len(np.unique(found)) > 1


def test_the_ladder_leaves_out_what_costs_more_and_loses_no_less() -> None:
    layer = replace(
        layer_like("a", 64, 1.0), nbytes=(5, 1, 2, 3, 4, 6, 7), errors=(3.0, 9.0, 5.0, 6.0, 4.0, 3.0, math.inf)
    )
    assert find_ladder(Table(CANDIDATES, FOUR, (layer,))) == [1, 2, 4, 0]


def test_places_on_the_ladder() -> None:
    assert place(model_like(5), np.array([-0.2, 0.0, 0.5, 1.0, 7.0])).tolist() == [0, 0, 3, 6, 6]
