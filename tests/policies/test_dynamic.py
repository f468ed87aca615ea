"""The dynamic programs of L-GreCo and Kimad+ against all choices there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx.errors import SpecError
from cgx.policies.base import Table, add_up, choose, find_fault, pin_silent
from cgx.policies.kimad import KimadPlus
from cgx.policies.knapsack import solve
from cgx.policies.l_greco import LGreco
from tests.policies.tables import (
    anything,
    errors,
    least_error,
    least_nbytes,
    model_like,
    tables,
)


@given(table=tables(st.integers(0, 9).map(float)), budget=st.integers(0, 40))
def test_whole_cells_give_the_optimum(table: Table, budget: int) -> None:
    if not table.layers:
        return
    found = solve(table.nbytes.astype(float), table.errors, budget, cell=1.0)
    best = least_nbytes(table, budget)
    assert (math.inf if found is None else table.nbytes_of(found)) == best
    assert found is None or table.error_of(found) <= budget


@settings(max_examples=200)
@given(table=tables(errors), cells=st.integers(4, 40), alpha=st.sampled_from([0.3, 1.0, 3.0]))
def test_size_lies_between_the_optimum_of_the_budget_and_of_what_rounding_leaves(
    table: Table, cells: int, alpha: float
) -> None:
    if find_fault(table):
        return
    budget = alpha * table.default_error
    choice = choose(LGreco(cells), table, max_error=budget)
    sound = pin_silent(table)  # bytes of layers without a gradient are not up for choice
    best, rounded = least_nbytes(sound, budget), least_nbytes(sound, budget * (1 - len(table.layers) / cells))
    assert choice.nbytes >= least_nbytes(table, budget) or not choice.fits
    assert choice.nbytes <= rounded
    if choice.fits and math.isfinite(best):
        fine = choose(LGreco(100_000), table, max_error=budget * (1 + 1e-9))
        assert fine.nbytes <= best


@settings(max_examples=200)
@given(
    table=tables(errors, layers=6), cell=st.floats(0.01, 2), budgets=st.lists(st.floats(0, 60), min_size=2, max_size=5)
)
def test_size_does_not_grow_with_the_budget_at_a_fixed_cell(table: Table, cell: float, budgets: list[float]) -> None:
    if not table.layers:
        return
    sizes = []
    for budget in sorted(budgets):
        found = solve(table.nbytes.astype(float), table.errors, budget, cell=cell)
        assert found is None or table.error_of(found) <= budget
        sizes.append(math.inf if found is None else table.nbytes_of(found))
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("layers", [3, 100, 700])
def test_more_cells_find_little_more(layers: int) -> None:
    """The program is exact but for rounding: ten times the cells gain less than the bound of one cell a layer."""
    table = model_like(layers)
    coarse, fine = (choose(LGreco(cells), table).nbytes for cells in (10_000, 100_000))
    assert fine <= coarse * 1.0001
    assert coarse <= fine * 1.001


def test_what_must_be_paid_is_not_rounded() -> None:
    """Without that, 50 layers in 10 cells would find nothing but the default."""
    table = model_like(50)
    assert choose(LGreco(cells=10), table).nbytes < 0.95 * table.nbytes_of(table.default_choice)


def test_choices_that_fit_but_for_rounding_are_found() -> None:
    """Each of three options takes two cells of the budget's three, yet they weigh 3.3 together."""
    costs, weights = np.array([[1.0, 0.0]] * 3), np.array([[0.0, 1.1]] * 3)
    assert solve(costs, weights, 3.3000001, cell=1.0) == (1, 1, 1)
    assert sum(solve(costs, weights, 3.2999999, cell=1.0) or ()) == 2


@pytest.mark.parametrize("room", [0.0, 1e-320])
def test_a_budget_without_room_gives_the_lightest(room: float) -> None:
    costs, weights = np.array([[1.0, 2.0, 3.0]]), np.array([[5.0, 4.0, 4.0]])
    assert solve(costs, weights, 4.0 + room, cell=1.0) == (1,)
    assert solve(costs, weights, np.nextafter(4.0, 0), cell=1.0) is None


@settings(max_examples=200)
@given(table=tables(errors), budget=st.integers(0, 90))
def test_kimad_finds_the_least_error_for_the_bytes(table: Table, budget: int) -> None:
    if find_fault(table):
        return
    choice, best = KimadPlus().choose(table, budget), least_error(table, budget)
    assert choice.fits == (choice.nbytes <= budget) == math.isfinite(best)
    if choice.fits:
        assert choice.error == pytest.approx(best, rel=1e-12)
    else:
        assert choice.nbytes == sum(min(layer.nbytes) for layer in table.layers)
        assert "no choice is within the budget" in choice.reason


@settings(max_examples=100)
@given(data=st.data(), table=tables(anything), budget=st.floats(0, 90))
def test_kimad_keeps_its_laws_on_any_table(data: st.DataObject, table: Table, budget: float) -> None:
    index = st.integers(0, len(table.candidates) - 1)
    previous = data.draw(st.tuples(*[index] * len(table.layers)))
    choice = KimadPlus().choose(table, budget, previous=previous)
    assert choice.reason
    assert choice.fits == (choice.nbytes <= budget)
    for kept in (previous, table.default_choice):
        if table.nbytes_of(kept) <= budget:
            assert choice.fits
            assert find_fault(table) is not None or choice.error <= table.error_of(kept)
    if find_fault(table) is not None and table.nbytes_of(previous) <= budget:
        assert choice.indices == previous


@pytest.mark.parametrize("cells", [10, 1000])
def test_more_bandwidth_never_means_more_error(cells: int) -> None:
    table = model_like(30)
    whole = table.nbytes_of((len(table.candidates) - 1,) * 30)
    choices = [KimadPlus(cells).choose(table, budget) for budget in np.linspace(0, 1.2 * whole, 60)]
    found = [choice.error for choice in choices if choice.fits]
    assert len(found) > 40
    assert found == sorted(found, reverse=True)
    assert found[-1] == add_up(min(layer.errors) for layer in table.layers)
    assert KimadPlus(cells).choose(table, math.inf).error == found[-1]


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_byte_budget_is_a_number_of_at_least_zero(budget: float) -> None:
    with pytest.raises(SpecError, match="byte budget"):
        KimadPlus().choose(model_like(2), budget)


def test_kimad_is_the_dual_of_l_greco() -> None:
    """With the bytes that L-GreCo found, Kimad+ finds an error no larger than L-GreCo's, up to its coarser cells."""
    table = model_like(30)
    smallest = choose(LGreco(), table)
    assert KimadPlus(cells=100_000).choose(table, smallest.nbytes).error <= smallest.error * (1 + 1e-12)
    assert KimadPlus().choose(table, smallest.nbytes).error <= smallest.error * 1.01
