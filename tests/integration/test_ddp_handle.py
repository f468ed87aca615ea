"""The handle that `cgx.compress` returns: taking cgx off and on again, other hooks, refusals, and its state."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import cgx
from cgx.torch.ddp import handle_of
from tests.harness import run_processes
from tests.integration.training import SMALL, all_equal, digest, step, wrapped
from tests.integration.zoo import mlp


def remove_and_go_on(rank: int) -> None:
    ours, stock = wrapped(**SMALL), wrapped(**SMALL)
    handle = cgx.compress(ours)
    for number in range(3):
        step(ours, rank, number)
        step(stock, rank, number)  # so that its buckets are rebuilt as well: Gloo's sums depend on them
    assert handle.report().reductions > 0
    handle.remove()
    stock.load_state_dict(ours.state_dict())
    for number in range(3, 6):
        step(ours, rank, number)
        step(stock, rank, number)
    assert digest(ours.parameters()) == digest(stock.parameters())
    handle.remove()  # once more changes nothing
    again = cgx.compress(ours, "uniform:2")
    assert again is not handle
    for number in range(6, 9):
        step(ours, rank, number)
        step(stock, rank, number)
    assert digest(ours.parameters()) != digest(stock.parameters())
    assert again.report().wire_nbytes > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_after_remove_gradients_are_stock_bit_for_bit_and_compress_works_again(world_size: int) -> None:
    run_processes(remove_and_go_on, world_size)


def off_then_on(rank: int) -> None:
    model = wrapped()
    handle = cgx.compress(model, "off")
    step(model, rank, 0)
    assert (handle.report().wire_nbytes, handle.report().reductions) == (0, 0)
    handle.load_state_dict(handle.state_dict())
    handle.remove()
    handle = cgx.compress(model, "uniform:4")
    step(model, rank, 1)
    assert handle.report().wire_nbytes > 0


def test_a_model_that_was_off_can_be_compressed_after_remove() -> None:
    run_processes(off_then_on, 2)


class Lines(logging.Handler):
    """Collects what cgx logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compress_twice(rank: int) -> None:
    log = Lines()
    logging.getLogger("cgx").addHandler(log)
    logging.getLogger("cgx").setLevel(logging.INFO)
    model = wrapped()
    handle = cgx.compress(model, "uniform:4")
    before = len(log.lines)
    assert cgx.compress(model, "uniform:2") is handle
    assert len(log.lines) == before + 1
    assert "already" in log.lines[-1]
    step(model, rank, 0)
    assert set(handle.report().plan) == {"uniform:4/block=128/rounding=dithered/scale=bf16", "identity"}


def test_a_second_compress_changes_nothing_and_says_so() -> None:
    run_processes(compress_twice, 2)


def other_hook_first(rank: int) -> None:
    model = wrapped()
    model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(cgx.SpecError, match="communication hook already"):
        cgx.compress(model)
    step(model, rank, 0)


def test_a_model_with_another_hook_is_refused_and_keeps_it() -> None:
    run_processes(other_hook_first, 2)


def refusals(rank: int) -> None:
    with pytest.raises(cgx.SpecError, match="DistributedDataParallel"):
        cgx.compress(mlp())  # type: ignore[arg-type]
    model = wrapped()
    for bad in ("uniform:9", "uniform:4/block=100", "zip", {"nothing.*": "uniform:4"}, 4, {"*": object()}):
        with pytest.raises(cgx.SpecError):
            cgx.compress(model, bad)  # type: ignore[arg-type]
    for nbytes in (0, -1):
        with pytest.raises(cgx.SpecError, match="piece"):
            cgx.compress(model, piece_nbytes=nbytes)
    with pytest.raises(cgx.SpecError, match="rate"):
        cgx.compress(model, throttle_bit_s=0)
    cgx.compress(model)  # none of them left anything behind
    step(model, rank, 0)


def test_bad_arguments_are_refused_before_anything_happens() -> None:
    run_processes(refusals, 2)


def saved_and_loaded(rank: int) -> None:
    model = wrapped()
    handle = cgx.compress(model, "uniform:2", error_feedback=True)
    step(model, rank, 0)
    buffer = io.BytesIO()
    torch.save(handle.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert {"0.weight", "3.weight"} <= set(state["residual"])
    assert state["residual"]["0.weight"].shape == model.module[0].weight.shape
    assert set(state["reduction_index"].values()) == {1}
    before = copy.deepcopy(handle.state_dict())
    bad: list[dict[str, Any]] = [
        {**state, "seed": 5},
        {**state, "world_size": 7},
        {**state, "version": 99},
        {**state, "residual": {}},
        {**state, "reduction_index": {"other": 1}},
        {**state, "residual": {**state["residual"], "0.weight": torch.zeros(3)}},
        {},
    ]
    for wrong in bad:
        with pytest.raises(cgx.SpecError, match="does not fit"):
            handle.load_state_dict(wrong)
    after = handle.state_dict()
    assert before["reduction_index"] == after["reduction_index"]
    assert digest(before["residual"].values()) == digest(after["residual"].values())
    step(model, rank, 1)
    assert set(handle.state_dict()["reduction_index"].values()) == {2}
    assert set(state["reduction_index"].values()) == {1}, "a saved state is a copy"
    handle.load_state_dict(state)
    assert set(handle.state_dict()["reduction_index"].values()) == {1}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    run_processes(saved_and_loaded, 2)


def copied(rank: int) -> list[str]:
    """Copies and pickles of a compressed model are stock DDP models; the original goes on."""
    model = wrapped()
    cgx.compress(model, "uniform:4")
    step(model, rank, 0)
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for other in (twin, loaded, model):
        step(other, rank, 1)
    assert handle_of(twin) is None
    assert handle_of(loaded) is None
    assert handle_of(model).report().reductions == 2
    return [digest(other.parameters()) for other in (twin, loaded, model)]


def test_a_compressed_model_can_be_copied_and_pickled() -> None:
    results = run_processes(copied, 2)
    assert all_equal(results)
    twin, loaded, model = results[0]
    assert twin == loaded != model


def dropped(rank: int) -> list[str]:
    model = wrapped()
    cgx.compress(model, "uniform:4")
    step(model, rank, 0)
    del model
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cgx-session")]


def test_a_dropped_model_ends_its_session() -> None:
    assert run_processes(dropped, 2) == [[], []]
