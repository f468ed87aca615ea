"""Ranks that ask for different things at the same time: the same class on all of them, no hang and no crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import cgx
from tests.faults.jobs import backward, wrapped
from tests.harness import outcomes_of

PATIENT_SECONDS, HARNESS_SECONDS = 100.0, 40.0
SHORT_SECONDS, GRACE_SECONDS = 4.0, 10.0
WORLD, ODD = 3, 1


def reduce_things(rank: int, what: str) -> None:
    """Reduce two tensors by hand; then the odd rank does something else."""
    tensors = {"a": torch.ones(50, 60), "b": torch.ones(300, 1000), "c": torch.ones(64, dtype=torch.float64)}
    for name in tensors:
        cgx.all_reduce({name: tensors[name]})
    odd: dict[str, Any] = {
        "another tensor": lambda: cgx.all_reduce({"b": tensors["b"]}),
        "a new tensor": lambda: cgx.all_reduce({"new": torch.ones(9, 9)}),
        "a new spec": lambda: cgx.all_reduce({"a": tensors["a"]}, "uniform:7"),
        "another op": lambda: cgx.all_reduce({"a": tensors["a"]}, op=dist.ReduceOp.AVG),
        "both": lambda: cgx.all_reduce({"a": tensors["a"], "b": tensors["b"]}),
    }
    if rank == ODD:
        odd[what]()
    else:
        cgx.all_reduce({"a": tensors["a"]})
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("what", ["another tensor", "a new tensor", "a new spec", "another op", "both"])
def test_a_rank_that_reduces_something_else_is_found_on_all_ranks(what: str) -> None:
    outcomes = outcomes_of(
        reduce_things, WORLD, what, timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, cgx.PlanMismatchError), outcome
        assert outcome.exit_code == 0
        other = ODD if rank != ODD else 0
        assert f"rank {other}" in str(outcome.error)


def register_things(rank: int, odd_first: bool) -> None:
    """Both new to the session, in different orders."""
    names = ["x", "y"] if (rank == ODD) == odd_first else ["y", "x"]
    for name in names:
        cgx.all_reduce({name: torch.ones(50, 60)})


@pytest.mark.parametrize("odd_first", [True, False])
def test_new_tensors_in_different_orders_name_the_difference(odd_first: bool) -> None:
    outcomes = outcomes_of(
        register_things, WORLD, odd_first, timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, cgx.PlanMismatchError), outcome
        assert "parameter x" in str(outcome.error)
        assert "parameter y" in str(outcome.error)


def one_more(rank: int) -> None:
    x = torch.ones(50, 60)
    store = dist.distributed_c10d._get_default_store()
    cgx.all_reduce(x)
    if rank != ODD:  # busy elsewhere for longer than the odd one waits
        store.wait(["done"])
        return
    try:
        cgx.all_reduce(x)
    finally:
        store.set("done", "")


def test_a_rank_that_reduces_once_more_than_the_others_is_told_in_time() -> None:
    outcomes = outcomes_of(one_more, WORLD, timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=SHORT_SECONDS)
    error = outcomes[ODD].error
    assert isinstance(error, cgx.CollectiveTimeoutError), outcomes[ODD]
    assert "cgx.all_reduce, call 1" in str(error)
    assert "from rank 0" in str(error)
    assert outcomes[ODD].seconds < SHORT_SECONDS + GRACE_SECONDS


def models_differ(rank: int, about: str) -> None:
    """Models that DDP takes for equal, compressed differently on the odd rank."""
    model = wrapped()
    options: dict[str, Any] = {}
    if rank == ODD:
        options = {
            "how": {"how": "uniform:3"},
            "some layers": {"how": {"3.*": "bf16", "*": "uniform:4"}},
            "seed": {"seed": 1},
            "error feedback": {"error_feedback": True},
            "piece": {"piece_nbytes": 1 << 16},
        }.get(about, {})
        if about == "names":
            model.module._modules["other"] = model.module._modules.pop("5")
    cgx.compress(model, **options)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ("how", "uniform:3"),
        ("some layers", "cast:bf16"),
        ("seed", "seed: 1"),
        ("error feedback", "error feedback: True"),
        ("piece", "piece bytes: 65536"),
        ("names", "parameter other.weight"),
    ],
)
def test_models_compressed_differently_are_refused_on_all_ranks(about: str, says: str) -> None:
    outcomes = outcomes_of(
        models_differ, WORLD, about, timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, cgx.PlanMismatchError), outcome
        assert outcome.exit_code == 0
        assert says in str(outcome.error)
        assert f"rank {ODD} has" in str(outcome.error)


def refused_then_agreed(rank: int) -> None:
    """After a refusal the same model can be compressed as agreed."""
    model = wrapped()
    with pytest.raises(cgx.PlanMismatchError):
        cgx.compress(model, seed=rank)
    backward(model, rank, 0)
    handle = cgx.compress(model)
    backward(model, rank, 1)
    assert handle.report().reductions > 0


def test_after_a_refusal_ranks_may_agree() -> None:
    for outcome in outcomes_of(refused_then_agreed, 2, timeout_seconds=HARNESS_SECONDS):
        assert outcome.error is None, outcome.trace


def exact_sums_differ(rank: int, what: str) -> None:
    """Uncompressed sums of different sizes would end the process inside Gloo, those of equal size be wrong."""
    names = {"larger": ["a", "b"], "equal": ["a", "c"], "new": ["a", "d"]}[what]
    sizes = {"a": 50, "b": 100_000, "c": 50, "d": 70}
    tensors = {name: torch.ones(size, dtype=torch.float64) for name, size in sizes.items()}
    for name in ("a", "b", "c"):
        cgx.all_reduce({name: tensors[name]})
    name = names[rank == ODD]
    cgx.all_reduce({name: tensors[name]})
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("what", ["larger", "equal", "new"])
def test_uncompressed_sums_of_different_tensors_are_found_on_all_ranks(what: str) -> None:
    outcomes = outcomes_of(
        exact_sums_differ, WORLD, what, timeout_seconds=HARNESS_SECONDS, group_timeout_seconds=PATIENT_SECONDS
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, cgx.PlanMismatchError), outcome
        assert outcome.exit_code == 0


def refused_registration(rank: int) -> None:
    """Tensors that are new to all ranks, of different shapes."""
    x = {"x": torch.ones(50, 60)}
    cgx.all_reduce(x)
    with pytest.raises(cgx.PlanMismatchError, match="ranks disagree about the plan"):
        cgx.all_reduce({"y": torch.ones(50 + rank, 60)})
    cgx.all_reduce(x)
    assert (x["x"] == 4).all()


def test_a_refused_registration_leaves_the_session_as_it_was() -> None:
    for outcome in outcomes_of(refused_registration, 2, timeout_seconds=HARNESS_SECONDS):
        assert outcome.error is None, outcome.trace
