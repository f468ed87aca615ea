"""A run that was killed and restarted from its files: on as many ranks, on others, by `torch.save` and by dcp."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import outcomes_of, run_processes
from tests.integration.training import SMALL, batch, digest, wrapped

_STEPS, _SAVED_AT, _KILLED_AT = 9, 4, 6
_SLOW = 2e7  # bits per second of a modelled link


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"cgx-{rank}.pt"


def save(way: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    rank, ours = dist.get_rank(), handle.state_dict()
    if way == "dcp":
        framework = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save({**framework, f"cgx-{rank}": ours}, checkpoint_id=folder / "dcp")
        return
    torch.save(ours, file_of(folder, rank))
    if rank == 0:  # the framework's own
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "model.pt")
    dist.barrier()


def load(way: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    rank = dist.get_rank()
    if way == "dcp":
        for parameter in model.parameters():  # dcp loads into what is there: momentum must be
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), f"cgx-{rank}": handle.state_dict()}
        dcp.load(state, checkpoint_id=folder / "dcp")
    else:
        state = torch.load(folder / "model.pt", weights_only=True)
        state[f"cgx-{rank}"] = torch.load(file_of(folder, rank), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state[f"cgx-{rank}"])


def train(rank: int, folder: Path, way: str, options: dict[str, Any], *, first: int = 0, killed_at: int = 99) -> Any:
    torch.manual_seed(3 if not first else 4)  # a resumed run must not owe its weights to the seed
    model = wrapped(3 if not first else 4, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = cgx.compress(model, **options)
    if first:
        load(way, folder, model, optimizer, handle)
    losses = []
    for step in range(first, _STEPS):
        if step == killed_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 == _SAVED_AT and not first:
            save(way, folder, model, optimizer, handle)
    return losses, digest(model.state_dict().values())


def killed(rank: int, folder: Path, way: str, options: dict[str, Any]) -> Any:
    return train(rank, folder, way, options, killed_at=_KILLED_AT)


def restarted(rank: int, folder: Path, way: str, options: dict[str, Any]) -> Any:
    return train(rank, folder, way, options, first=_SAVED_AT)


@pytest.mark.parametrize("way", ["torch.save", "dcp"])
@pytest.mark.parametrize("options", [{"how": "uniform:4"}, {"how": "uniform:2", "error_feedback": True}], ids=str)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, way: str, options: dict[str, Any]) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = run_processes(train, 2, tmp_path / "whole", way, options)
    cut = outcomes_of(killed, 2, tmp_path / "cut", way, options)
    assert cut[1].exit_code == -signal.SIGKILL
    assert isinstance(cut[0].error, cgx.TransportError), "its peer is gone"
    resumed = run_processes(restarted, 2, tmp_path / "cut", way, options)
    for (losses, bits), (losses_after, bits_after) in zip(whole, resumed, strict=True):
        assert losses[_SAVED_AT:] == losses_after
        assert bits == bits_after


def without_residuals(rank: int, folder: Path) -> str:
    path = file_of(folder, rank)
    state = torch.load(path, weights_only=True)
    for tensor in state["residual"].values():
        tensor.zero_()
    torch.save(state, path)
    dist.barrier()
    return str(train(rank, folder, "torch.save", {"how": "uniform:2", "error_feedback": True}, first=_SAVED_AT)[1])


def test_residuals_are_part_of_what_continues(tmp_path: Path) -> None:
    options = {"how": "uniform:2", "error_feedback": True}
    (_, whole), _ = run_processes(train, 2, tmp_path, "torch.save", options)
    assert run_processes(without_residuals, 2, tmp_path)[0] != whole


def net() -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(nn.Sequential(nn.Linear(100, 150), nn.Linear(150, 100)))


def owing(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    model = net()
    handle = cgx.compress(model, "uniform:2+identity", error_feedback=True, **options)
    for number in range(3):
        x = torch.randn(16, 100, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
    torch.save(handle.state_dict(), file_of(folder, rank))
    return {name: tensor.numpy() for name, tensor in handle.state_dict()["residual"].items()}


def paying(rank: int, folder: Path, options: dict[str, Any], saved_ranks: int) -> Any:
    """Reduce gradients of zero: all that arrives is what was owed."""
    model = net()
    handle = cgx.compress(model, "uniform:2+identity", error_feedback=True, **options)
    handle.load_state_dict(torch.load(file_of(folder, r), weights_only=True) for r in range(saved_ranks))
    assert set(handle.state_dict()["reduction_index"].values()) == {3}
    (model(torch.ones(1, 100)) * 0).sum().backward()
    paid = {name: parameter.grad.numpy() for name, parameter in model.module.named_parameters()}
    return paid, {name: tensor.numpy() for name, tensor in handle.state_dict()["residual"].items()}


@pytest.mark.parametrize(
    ("before", "after", "algorithm"),
    [(4, 2, "scatter_reduce"), (2, 4, "scatter_reduce"), (3, 2, "scatter_reduce"), (2, 3, "all_gather")],
)
def test_another_world_size_loses_nothing_owed(tmp_path: Path, before: int, after: int, algorithm: str) -> None:
    options = {"algorithm": algorithm}
    old = run_processes(owing, before, tmp_path, options)
    new = run_processes(paying, after, tmp_path, options, before)
    for name in old[0]:
        owed = np.mean([residual[name] for residual in old], axis=0)
        assert np.abs(owed).max() > 1e-4, "or there is nothing to see"
        still_owed = np.mean([residual[name] for _, residual in new], axis=0)
        np.testing.assert_allclose(new[0][0][name] + still_owed, owed, rtol=0, atol=4e-6 * np.abs(owed).max())
        if algorithm == "scatter_reduce":  # owners never encode what they own: it would be owed for ever
            assert not np.min([np.abs(residual[name]) for _, residual in new], axis=0).any()


def misuse(rank: int) -> None:
    model = net()
    handle = cgx.compress(model, "uniform:2", error_feedback=True)
    model(torch.ones(1, 100)).sum().backward()
    mine = handle.state_dict()
    other = {**mine, "rank": 1 - rank}
    far = [{**mine, "rank": r, "world_size": 3} for r in range(3)]
    later = {**other, "reduction_index": dict.fromkeys(mine["reduction_index"], 9)}
    for bad, remedy in (
        (other, rf"load this rank's file.*cgx-{rank}\.pt"),
        (far[0], r"pass the states of all ranks.*range\(3\)"),
        (far[:2], r"pass the states of all ranks.*range\(3\)"),
        ([mine, later], "saved at the same step"),
        ([], "pass what state_dict"),
        ({**mine, "seed": 7}, "seed=7"),
        ({**mine, "residual": {}}, "error_feedback=False"),
        ("cgx-0.pt", "pass what state_dict"),
    ):
        with pytest.raises(cgx.SpecError, match=remedy):
            handle.load_state_dict(bad)
    handle.load_state_dict([other, mine])
    handle.load_state_dict(mine)
    handle.remove()
    handle = cgx.compress(model, "uniform:2")
    plain = handle.state_dict()
    with pytest.raises(cgx.SpecError, match="error_feedback=True"):
        handle.load_state_dict(mine)
    handle.load_state_dict({**plain, "rank": 5, "world_size": 8})  # nothing owed: any rank's state will do


def test_a_state_that_does_not_fit_says_what_to_do() -> None:
    run_processes(misuse, 2)


def loaded_by_one(rank: int, how: str) -> str:
    model = net()
    handle = cgx.compress(model, how, throttle_bit_s=_SLOW if how == "auto" else None)
    x = torch.ones(4, 100)
    model(x).sum().backward()
    state = handle.state_dict()
    model(x).sum().backward()
    if rank == 0:
        handle.load_state_dict(state)
    for _ in range(40):
        try:
            model(x).sum().backward()
        except cgx.CgxError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("how", ["uniform:4", "auto"])
def test_ranks_that_load_different_states_are_told_at_once(how: str) -> None:
    for told in run_processes(loaded_by_one, 2, how):
        assert told.startswith(("PlanMismatchError", "WireError", "PeerLostError")), told


def wide() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))


def settle(rank: int, folder: Path) -> tuple[str, int]:
    model = wide()
    handle = cgx.compress(model, "auto", throttle_bit_s=_SLOW)
    for _ in range(200):
        model(torch.randn(4, 128)).square().mean().backward()
        if handle.report().auto.is_settled:
            break
    state = handle.state_dict()
    torch.save(state, file_of(folder, rank))
    assert state["auto"]["is_settled"]
    return state["auto"]["choice"], state["auto"]["step"]


def go_on(rank: int, folder: Path, bit_s: float, of_rank: int | None) -> Any:
    model = wide()
    handle = cgx.compress(model, "auto", throttle_bit_s=bit_s)
    state = torch.load(file_of(folder, rank), weights_only=True)
    if rank == of_rank:
        state["auto"]["step"] += 1
    handle.load_state_dict(state)
    try:
        model(torch.randn(4, 128)).square().mean().backward()
    except cgx.PlanMismatchError as error:
        return str(error)
    auto = handle.report().auto
    return auto.choice, auto.is_settled, auto.history[-1]


def test_auto_keeps_a_settled_choice_where_the_link_is_as_it_was(tmp_path: Path) -> None:
    (choice, step), _ = run_processes(settle, 2, tmp_path)
    for now, is_settled, told in run_processes(go_on, 2, tmp_path, _SLOW, None):
        assert (now, is_settled) == (choice, True)
        assert f"step {step + 1}: as saved" in told
    for _, is_settled, told in run_processes(go_on, 2, tmp_path, _SLOW * 4, None):
        assert not is_settled
        assert "not as it was" in told
    for told in run_processes(go_on, 2, tmp_path, _SLOW, 1):
        assert "ranks loaded different states" in told
