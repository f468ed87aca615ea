"""How people use DDP: other traffic, scalers, joins, groups, several models, frozen layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import run_processes
from tests.integration.training import SMALL, all_equal, batch, digest, step, wrapped
from tests.integration.zoo import mlp


def metrics_between(rank: int) -> str:
    """Train while the user's own collectives run on the default group, also from gradient hooks."""
    world = dist.get_world_size()
    model = wrapped(**SMALL)
    cgx.compress(model, piece_nbytes=3000)
    seen = []

    def average(gradient: torch.Tensor) -> torch.Tensor:
        norm = gradient.norm()
        dist.all_reduce(norm)
        seen.append(norm)
        return gradient

    for layer in (0, 3, 5):
        model.module[layer].weight.register_hook(average)
    for number in range(10):
        step(model, rank, number)
        count = torch.tensor([rank + 1.0])
        work = dist.all_reduce(count, async_op=True)
        objects = [None] * world
        dist.all_gather_object(objects, (rank, number))
        assert objects == [(r, number) for r in range(world)]
        work.wait()
        assert count.item() == world * (world + 1) / 2
        dist.barrier()
    assert len(seen) == 30
    return digest([*seen, *model.parameters()])


def test_the_users_own_collectives_are_undisturbed() -> None:
    assert all_equal(run_processes(metrics_between, 3))


def two_models(rank: int) -> list[str]:
    """Train two models whose backward passes interleave, in one graph and in two."""
    a, b = wrapped(1, **SMALL), wrapped(2, **SMALL)
    cgx.compress(a, "uniform:4")
    cgx.compress(b, "uniform:2", error_feedback=True)
    for number in range(6):
        for model in (a, b):
            model.zero_grad()
        x, y = batch(rank, number)
        outputs = a(x), b(x)
        if number % 2:
            nn.functional.cross_entropy(outputs[0] + outputs[1], y).backward()
        else:
            losses = [nn.functional.cross_entropy(output, y) for output in outputs]
            for loss in reversed(losses):
                loss.backward()
        with torch.no_grad():
            for model in (a, b):
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
    return [digest(model.parameters()) for model in (a, b)]


def test_two_models_in_one_process_interleave() -> None:
    assert all_equal(run_processes(two_models, 3))


def scaled(rank: int) -> list[Any]:
    """Train with a GradScaler; rank 1 gets an infinite loss once."""
    model = wrapped()
    cgx.compress(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for number in range(5):
        optimizer.zero_grad()
        x, y = batch(rank, number)
        if number == 2 and rank == 1:
            x[0, 0] = float("inf")
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        bad = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        seen.append((bad, before == digest(model.parameters()), scaler.get_scale()))
    return [seen, digest(model.parameters())]


def test_a_grad_scaler_skips_the_step_on_all_ranks() -> None:
    results = run_processes(scaled, 3)
    assert all_equal(results)
    steps = results[0][0]
    assert [bad for bad, _, _ in steps] == [False, False, True, False, False]
    assert [skipped for _, skipped, _ in steps] == [False, False, True, False, False]
    assert steps[1][2] == 2 * steps[2][2]


def poisoned(rank: int) -> None:
    """Rank 1 puts NaN into one element of one gradient."""
    model = wrapped()
    cgx.compress(model, "uniform:4+uniform:8/block=128")

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[300] = float("nan")
        return gradient

    if rank == 1:
        model.module[3].weight.register_hook(poison)
    x, y = batch(rank, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    bad = torch.cat([~torch.isfinite(p.grad).view(-1) for p in model.parameters()])
    where = ~torch.isfinite(model.module[3].weight.grad.view(-1))
    assert where.nonzero().view(-1).tolist() == list(range(256, 384))
    assert bad.sum() == 128


def test_nan_on_one_rank_is_on_all_ranks_in_its_block_alone() -> None:
    run_processes(poisoned, 3)


def clipped(rank: int) -> list[Any]:
    model = wrapped()
    cgx.compress(model)
    x, y = batch(rank, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm.item(), digest(p.grad for p in model.parameters())]


def test_clipping_sees_equal_norms() -> None:
    assert all_equal(run_processes(clipped, 3))


def uneven(rank: int) -> str:
    """Ranks have different numbers of batches; DDP's join shadows the missing ones."""
    model = wrapped(**SMALL)
    cgx.compress(model)
    with Join([model]):
        for number in range(3 + 2 * rank):
            step(model, rank, number)
    return digest(model.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_uneven_inputs_join(world_size: int) -> None:
    assert all_equal(run_processes(uneven, world_size))


def in_a_group(rank: int) -> Any:
    """Two groups train two models; the ranks of a group need not start at zero."""
    groups = [dist.new_group([0]), dist.new_group([1, 3]), dist.new_group([0, 2])]
    if rank in (1, 3):
        model = wrapped(process_group=groups[1])
        handle = cgx.compress(model, "uniform:4")
        for number in range(5):
            step(model, rank, number)
        assert handle.report().world_size == 2
        return digest(model.parameters())
    if rank == 0:
        alone = wrapped(process_group=groups[0])
        handle = cgx.compress(alone)
        step(alone, rank, 0)
        assert handle.report().wire_nbytes == 0
    x = torch.ones(64, 64) * (rank + 1)
    cgx.all_reduce(x, group=groups[2])
    assert (x == 4).all()
    return None


def test_groups_of_some_ranks() -> None:
    results = run_processes(in_a_group, 4)
    assert results[1] == results[3]
    assert results[1] is not None


def refrozen(rank: int) -> str:
    """Freeze a layer after some steps, and let it go again, wrapping anew each time as DDP asks for."""
    torch.manual_seed(3)
    module = mlp()
    for round_number, is_frozen in enumerate([False, True, False]):
        module[3].weight.requires_grad_(not is_frozen)
        model = DistributedDataParallel(module)
        handle = cgx.compress(model)
        for number in range(2):
            model.zero_grad(set_to_none=True)
            x, y = batch(rank, 10 * round_number + number)
            nn.functional.cross_entropy(model(x), y).backward()
            assert (module[3].weight.grad is None) == is_frozen
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
        handle.remove()
    return digest(module.parameters())


def test_layers_frozen_and_let_go_again() -> None:
    assert all_equal(run_processes(refrozen, 2))


def frozen_later(rank: int) -> str:
    """Freeze a layer under a living DDP model that looks for unused parameters."""
    model = wrapped(find_unused_parameters=True, **SMALL)
    cgx.compress(model)
    for number, is_frozen in enumerate([False, True, True, False]):
        model.module[3].weight.requires_grad_(not is_frozen)
        model.zero_grad(set_to_none=True)
        x, y = batch(rank, number)
        nn.functional.cross_entropy(model(x), y).backward()
        assert (model.module[3].weight.grad is None) == is_frozen
    return digest(p.grad for p in model.parameters())


def test_a_layer_frozen_while_ddp_lives() -> None:
    assert all_equal(run_processes(frozen_later, 2))


def graph_kept(rank: int) -> str:
    """Two backward passes through one graph, and a backward pass that fails in between."""
    model = wrapped()
    cgx.compress(model)
    x, y = batch(rank, 0)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    step(model, rank, 1)
    return digest([*first, *model.parameters()])


def test_retained_graphs() -> None:
    assert all_equal(run_processes(graph_kept, 2))


def many_models(rank: int) -> int:
    """Make, train and drop models in a loop, as a search over options does."""
    import threading

    for number in range(5):
        model = wrapped(number)
        handle = cgx.compress(model)
        step(model, rank, 0)
        handle.remove()
    return sum(thread.name.startswith("cgx") for thread in threading.enumerate())


def test_removed_sessions_leave_no_threads() -> None:
    assert run_processes(many_models, 2) == [0, 0]


def reinitialised(rank: int) -> None:
    """Destroy the default group and make another in the same process."""
    x = torch.full((64, 64), rank + 1.0)
    cgx.all_reduce(x)
    assert (x == 3).all()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    x = torch.full((64, 64), rank + 1.0)
    cgx.all_reduce(x)
    assert (x == 3).all()
    model = wrapped()
    cgx.compress(model)
    step(model, rank, 0)


def test_a_process_may_leave_its_group_and_join_another() -> None:
    run_processes(reinitialised, 2)


def reported(rank: int) -> Any:
    model = wrapped(**SMALL)
    handle = cgx.compress(model)
    for number in range(4):
        step(model, rank, number)
    report = handle.report()
    assert report.raw_nbytes == 4 * 4 * sum(p.numel() for p in model.parameters())
    assert report.reductions >= 4
    assert "uniform:4" in str(report)
    assert "real link" in str(report)
    return report.wire_nbytes


def test_the_report_counts_gradients_and_bytes_on_the_wire() -> None:
    sent = run_processes(reported, 2)
    weights = 64 * 128 + 128 * 128 + 128 * 10
    vectors = 128 + 2 * 128 + 128 + 10
    # 4.25 bits an element in both phases, half of each per rank; vectors as they are, heads and padding on top.
    payload = 4 * 2 * (weights * 4.25 / 8 + vectors * 4)
    assert payload < sum(sent) < 1.1 * payload + 4 * 2 * 30 * 16
