"""Every policy keeps the laws at the head of `cgx.policies.base`, on any table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx.errors import SpecError
from cgx.policies.base import Choice, Layer, Policy, Table, choose, find_fault
from cgx.policies.l_greco import LGreco
from tests.policies.tables import (
    CANDIDATES,
    FOUR,
    POLICIES,
    anything,
    layer_like,
    least_nbytes,
    model_like,
    tables,
)

each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
ADAPTIVE = {name: policy for name, policy in POLICIES.items() if name != "same_for_all"}
EQUAL = {name: policy for name, policy in POLICIES.items() if not name.startswith("l_greco")}


def previous_of(data: st.DataObject, table: Table) -> Sequence[int] | None:
    index = st.integers(0, len(table.candidates) - 1)
    size = len(table.layers)
    return data.draw(st.one_of(st.none(), st.lists(index, min_size=size, max_size=size)))


def check(choice: Choice, table: Table, max_error: float, previous: Sequence[int] | None) -> None:
    """Laws 1 and 2, against all choices there are."""
    assert (choice.nbytes, choice.error) == (table.nbytes_of(choice.indices), table.error_of(choice.indices))
    assert choice.fits == (choice.error <= max_error)
    assert choice.fits or math.isinf(least_nbytes(table, max_error))
    for kept in (table.default_choice, previous):
        if kept is not None and table.error_of(kept) <= max_error:
            assert choice.nbytes <= table.nbytes_of(kept)


@each_policy
@settings(max_examples=50)
@given(data=st.data(), table=tables())
def test_budget_is_kept_and_the_default_is_never_beaten_in_size(
    policy: Policy, data: st.DataObject, table: Table
) -> None:
    previous = previous_of(data, table)
    max_error = data.draw(st.one_of(st.just(table.default_error), st.floats(0, 40)))
    choice = choose(policy, table, max_error=max_error, previous=previous)
    if find_fault(table) is None:
        check(choice, table, max_error, previous)


@each_policy
@settings(max_examples=50)
@given(data=st.data(), table=tables(anything))
def test_any_numbers_give_a_choice_and_a_reason(policy: Policy, data: st.DataObject, table: Table) -> None:
    previous = previous_of(data, table)
    choice = choose(policy, table, previous=previous)
    assert choice.reason
    if find_fault(table) is None:
        check(choice, table, table.default_error, previous)
    else:
        assert choice.indices == tuple(table.default_choice if previous is None else previous)
        assert "kept" in choice.reason


@pytest.mark.parametrize("policy", ADAPTIVE.values(), ids=list(ADAPTIVE))
def test_adaptive_policies_beat_the_default_on_a_model(policy: Policy) -> None:
    table = model_like(40)
    saved = table.nbytes_of(table.default_choice) / choose(policy, table).nbytes
    assert saved >= (1.15 if policy != LGreco(cells=2) else 1.0), f"{saved:.3f} times fewer bytes"


@each_policy
def test_the_same_question_has_the_same_answer(policy: Policy) -> None:
    assert choose(policy, model_like(15)) == choose(replace(policy), model_like(15))  # type: ignore[type-var]


@each_policy
def test_where_only_the_default_fits_it_is_returned(policy: Policy) -> None:
    layers = tuple(Layer(f"l{i}", 1000, 1.0, (1, 2, 3), (9.0 + i, 1.0 + 0.1 * i, 0.99 + 0.1 * i)) for i in range(30))
    table = Table(CANDIDATES[:3], 1, layers)
    assert choose(policy, table).indices == table.default_choice


@each_policy
def test_one_layer_gets_the_smallest_that_fits(policy: Policy) -> None:
    table = Table(CANDIDATES, FOUR, (layer_like("only", 4096, 1.0),))
    assert choose(policy, table, max_error=1.01 / 7**2).indices == (1,), "three bits"


@pytest.mark.parametrize("policy", EQUAL.values(), ids=list(EQUAL))
def test_equal_layers_get_equal_specs(policy: Policy) -> None:
    layers = model_like(6).layers
    table = Table(
        CANDIDATES, FOUR, tuple(replace(layer, name=f"{layer.name}.{i}") for i in range(5) for layer in layers)
    )
    indices = choose(policy, table).indices
    assert len(set(indices)) > 1 or policy is POLICIES["same_for_all"]
    assert indices == indices[:6] * 5


@pytest.mark.parametrize("policy", ADAPTIVE.values(), ids=list(ADAPTIVE))
def test_a_huge_layer_of_small_norm_gets_no_more_bits_than_others(policy: Policy) -> None:
    others = [layer_like(f"l{i}", 20_000 + 1000 * i, 1.0 + 0.1 * i) for i in range(12)]
    table = Table(CANDIDATES, FOUR, (layer_like("embedding", 4_000_000, 0.3), *others))
    embedding, *rest = choose(policy, table).indices
    assert embedding <= min(rest)


@each_policy
def test_a_layer_without_a_gradient_keeps_the_default(policy: Policy) -> None:
    unused = layer_like("unused", 50_000, 0.0)
    table = Table(CANDIDATES, FOUR, (*model_like(8).layers, unused))
    assert choose(policy, table).indices[-1] == FOUR or policy is POLICIES["same_for_all"]


@each_policy
def test_a_budget_below_the_default_is_kept(policy: Policy) -> None:
    table = model_like(20)
    choice = choose(policy, table, max_error=0.2 * table.default_error, previous=table.default_choice)
    assert choice.fits
    assert choice.nbytes > table.nbytes_of(table.default_choice)


@each_policy
def test_no_choice_fits(policy: Policy) -> None:
    table = model_like(3)
    choice = choose(policy, table, max_error=0.0, previous=table.default_choice)
    assert choice.indices == (len(CANDIDATES) - 1,) * 3
    assert not choice.fits
    assert choice.reason.startswith("no choice is within the error budget of 0")


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "there are no layers"),
        ([layer_like("a", 64, 1.0), layer_like("b", 64, 1.0, math.nan)], "layer 'b' has error nan"),
        ([layer_like("a", 64, 1.0), layer_like("b", 64, math.inf)], "layer 'b' has error inf"),
        ([layer_like("a", 64, 1.0, -1.0)], "layer 'a' has error -"),
        ([replace(layer_like("a", 64, 1.0), norm=math.nan)], "and norm nan"),
        ([layer_like("a", 64, 0.0), layer_like("b", 64, 0.0)], "all errors are zero"),
        ([replace(layer_like("a", 64, 1.0), errors=(1e308,) * 7)] * 2, "add up to infinity"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_degenerate_tables_say_what_is_wrong(layers: list[Layer], reason: str) -> None:
    table = Table(CANDIDATES, FOUR, tuple(layers))
    choice = choose(POLICIES["l_greco"], table)
    assert choice.indices == table.default_choice
    assert choice.reason.startswith("the default is kept: ")
    assert reason in choice.reason
    kept = choose(POLICIES["l_greco"], table, previous=(0,) * len(layers))
    assert kept.indices == (0,) * len(layers)
    assert kept.reason.startswith("the previous choice is kept: ")


def test_a_candidate_that_serves_few_layers_is_used_there_alone() -> None:
    layers = [layer_like(f"l{i}", 10_000, 1.0) for i in range(4)]
    layers = [replace(each, errors=(math.inf if i else 1e-9, *each.errors[1:])) for i, each in enumerate(layers)]
    assert choose(POLICIES["l_greco"], Table(CANDIDATES, FOUR, tuple(layers))).indices.count(0) == 1


def test_the_previous_choice_wins_over_a_worse_proposal() -> None:
    class Silent:
        def propose(self, table: Table, max_error: float) -> None:
            return None

    table = model_like(5)
    better = choose(POLICIES["l_greco"], table).indices
    assert choose(Silent(), table, previous=better).indices == better
    assert choose(Silent(), table).indices == table.default_choice


def test_specs_of_a_choice() -> None:
    table = model_like(3)
    choice = choose(POLICIES["linear"], table)
    assert choice.specs(table) == {f"l{i}": CANDIDATES[index] for i, index in enumerate(choice.indices)}


@pytest.mark.parametrize("max_error", [-1.0, math.nan, math.inf])
def test_a_budget_is_a_finite_number_of_at_least_zero(max_error: float) -> None:
    with pytest.raises(SpecError, match="error budget"):
        choose(POLICIES["linear"], model_like(2), max_error=max_error)


@pytest.mark.parametrize("previous", [(0,), (0, 7), (0, -1)])
def test_the_previous_choice_belongs_to_the_table(previous: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="another table"):
        choose(POLICIES["linear"], model_like(2), previous=previous)


def test_a_table_is_rectangular() -> None:
    with pytest.raises(SpecError, match="'l0' has 7 sizes and 6 errors"):
        Table(CANDIDATES, FOUR, (replace(model_like(1).layers[0], errors=(1.0,) * 6),))
    with pytest.raises(SpecError, match="default is candidate 7"):
        Table(CANDIDATES, 7, ())
