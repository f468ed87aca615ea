"""``how="auto"``: compresses where the link is slow, leaves the model alone where it is not, follows the link."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.collectives.base import Op
from cgx.torch import functional
from tests.harness import run_processes
from tests.integration.training import SMALL, digest, step, wrapped

_SLOW, _FAST = 2e7, 1e10  # bits per second of a modelled link
_MOST_STEPS = 400


def wide(rank: int) -> DistributedDataParallel:
    """A model of a quarter megabyte, nearly all of it compressible."""
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]))


def train_until_settled(model: DistributedDataParallel, handle: Any, rank: int, decisions: int) -> int:
    """Trains until that many decisions stand in the report; returns the steps it took."""
    for number in range(_MOST_STEPS):
        auto = handle.report().auto
        if auto.is_settled and sum(" a step" in line for line in auto.history) >= decisions:
            return number
        model.zero_grad()
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(100 * number + rank))
        model(x).square().mean().backward()
    raise AssertionError(f"not settled after {_MOST_STEPS} steps: {handle.report()}")


def slow(rank: int) -> tuple[str, str, str]:
    model = wide(rank)
    handle = cgx.compress(model, "auto", throttle_bit_s=_SLOW)
    train_until_settled(model, handle, rank, 1)
    report = handle.report()
    assert report.auto is not None
    assert report.auto.expected_seconds["uniform:4"] < report.auto.expected_seconds["off"]
    assert "off" not in report.auto.step_seconds, "physics rules it out; a trial would cost the user a step"
    assert "Gbit/s" in report.auto.history[-1]
    assert report.plan == {"uniform:4/block=128/rounding=dithered/scale=bf16": 4, "identity": 4}
    return report.auto.choice, digest(p.grad for p in model.parameters()), str(report.auto.history)


def test_on_a_slow_link_it_settles_on_few_bits_and_says_why() -> None:
    outcomes = run_processes(slow, 2)
    assert outcomes[0] == outcomes[1], "ranks must decide alike and hold the same gradients"
    assert outcomes[0][0] == "uniform:4"


def fast(rank: int) -> None:
    ours, stock = wrapped(**SMALL), wrapped(**SMALL)
    handle = cgx.compress(ours, "auto")
    assert cgx.compress(ours, "auto") is handle
    for number in range(5):
        step(ours, rank, number)
        step(stock, rank, number)
    assert digest(ours.parameters()) == digest(stock.parameters())
    report = handle.report()
    assert report.auto is not None
    assert (report.auto.choice, report.auto.is_settled, report.reductions) == ("off", True, 0)
    assert "leaving the model alone" in report.auto.history[-1]
    handle.load_state_dict(handle.state_dict())
    handle.remove()
    ours.register_comm_hook(None, fp16_compress_hook)  # nothing of ours is in its place


def test_where_compression_cannot_pay_nothing_is_put_on_the_model() -> None:
    run_processes(fast, 2)


def changing(rank: int) -> tuple[list[str], str]:
    model = wide(rank)
    handle = cgx.compress(model, "auto", throttle_bit_s=_SLOW)
    train_until_settled(model, handle, rank, 1)
    choices = [handle.report().auto.choice]
    for decisions, bit_s in ((2, _FAST), (3, _SLOW)):
        handle.session.scatter_lane._link.bit_s = bit_s
        train_until_settled(model, handle, rank, decisions)
        choices.append(handle.report().auto.choice)
    return choices, digest(p.grad for p in model.parameters())


def test_it_decides_anew_when_the_link_changes() -> None:
    (choices, gradients), (others, theirs) = run_processes(changing, 2)
    assert (choices, gradients) == (others, theirs)
    assert choices[0] == choices[2] == "uniform:4"


def refused(rank: int) -> None:
    with pytest.raises(cgx.SpecError, match="error feedback"):
        cgx.compress(wide(rank), "auto", error_feedback=True)


def test_error_feedback_is_refused() -> None:
    run_processes(refused, 2)


def by_size(rank: int) -> list[str]:
    choices = []
    for numel in (1, 256, 1 << 18):
        for call in range(80):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(call + rank))
            exact = x.clone()
            dist.all_reduce(exact)
            cgx.all_reduce(x, "auto")
            assert (x - exact).square().sum() <= 0.02 * exact.square().sum() + 1e-12
        choices.append(functional.chooser_of(dist.group.WORLD).choice(4 * numel))  # type: ignore[arg-type]
        mean = torch.full((numel,), float(rank))
        cgx.all_reduce(mean, "auto", op=dist.ReduceOp.AVG)
        assert mean.allclose(torch.tensor(0.5), atol=0.01)
    named = {"a": torch.full((3, 5), rank + 1.0), "b": torch.full((2,), rank + 1.0, dtype=torch.float64)}
    for _ in range(3):
        cgx.all_reduce(named, "auto", op=dist.ReduceOp.AVG)
    assert all((t == 1.5).all() for t in named.values())
    strided = torch.full((100, 20), rank + 1.0)
    cgx.all_reduce(strided[::2], "auto")
    assert (strided[::2] == 3.0).all()
    assert (strided[1::2] == rank + 1.0).all()
    for _ in range(300):  # past the first look at a decision
        cgx.all_reduce(torch.ones(1), "auto")
    return choices


def forgotten(rank: int) -> None:
    for how in ("uniform:4", "auto"):
        model = wide(rank)
        handle = cgx.compress(model, how, throttle_bit_s=_SLOW)
        model(torch.ones(4, 128)).mean().backward()
        handle.remove()
        alive = weakref.ref(model)
        del model, handle
        gc.collect()
        assert alive() is None, how


def test_a_model_that_was_compressed_can_be_freed() -> None:
    run_processes(forgotten, 2)


def bereaved(rank: int) -> str:
    for _ in range(60):
        cgx.all_reduce(torch.ones(3), "auto")
    assert functional.chooser_of(dist.group.WORLD).choice(12) == "off"  # type: ignore[arg-type]
    if rank == 1:
        return "left"
    told = []
    for tensor in (torch.ones(3), nn.Parameter(torch.ones(3)), torch.ones(3)):  # by either path, and ever after
        with pytest.raises(cgx.TransportError) as caught:
            cgx.all_reduce(tensor, "auto")
        told.append(str(caught.value))
    return told[0]


def test_a_lost_peer_is_a_transport_error_where_the_engine_sums() -> None:
    assert "exact all-reduce" in run_processes(bereaved, 2, group_timeout_seconds=3.0)[0]


def doubles_first(rank: int) -> list[str]:
    wide64, wide32 = torch.ones(1 << 17, dtype=torch.float64), torch.ones(1 << 18)
    for _ in range(80):
        cgx.all_reduce(wide64, "auto", op=dist.ReduceOp.AVG)
        cgx.all_reduce(wide32, "auto", op=dist.ReduceOp.AVG)
    chooser = functional.chooser_of(dist.group.WORLD)  # type: ignore[arg-type]
    return [chooser.choice(1 << 20, dtype) for dtype in (torch.float64, torch.float32)]


def test_a_dtype_that_cannot_be_compressed_decides_for_itself_alone() -> None:
    mine, theirs = run_processes(doubles_first, 2)
    assert mine == theirs
    assert mine[0] == "off"


def natively(rank: int) -> None:
    weight = nn.Parameter(torch.full((3, 5), rank + 1.0))
    alike = {
        "plain": torch.full((3, 5), rank + 1.0),
        "weight": weight,
        "transposed": torch.full((5, 3), rank + 1.0).t(),
        "strided": torch.full((6, 5), rank + 1.0)[::2],
        "double": torch.full((3, 5), rank + 1.0, dtype=torch.float64),
        "complex": torch.full((3, 5), (rank + 1.0) * 1j),
        "mapping": {"tensor": torch.full((3, 5), rank + 1.0)},
    }
    for _ in range(60):
        cgx.all_reduce(torch.ones(3, 5), "auto")
    chooser = functional.chooser_of(dist.group.WORLD)  # type: ignore[arg-type]
    assert chooser.choice(60) == "off"
    assert chooser.reduce_natively(torch.ones(3, 5), Op.SUM)
    for case, given in alike.items():
        (tensor,) = given.values() if isinstance(given, dict) else (given,)
        kept = tensor.detach().clone()
        for op, factor in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5)):
            tensor.data.copy_(kept)
            cgx.all_reduce(given, "auto", op=op)
            assert torch.equal(tensor.detach(), kept / (rank + 1) * factor), (case, op)


def test_a_tensor_known_to_travel_exact_takes_the_engines_own_path_whatever_its_memory_is_like() -> None:
    run_processes(natively, 2)


def mismatched(rank: int) -> None:
    for _ in range(3):
        cgx.all_reduce(torch.ones(4), "auto")
    names = ("a", "b") if rank == 0 else ("b", "a")
    with pytest.raises(cgx.PlanMismatchError, match="tensors to reduce"):
        cgx.all_reduce({name: torch.ones(4) for name in names}, "auto")


def test_all_reduce_finds_ranks_that_reduce_different_tensors() -> None:
    run_processes(mismatched, 2)


def sparse(rank: int) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(64, 128, sparse=True), nn.Linear(128, 512), nn.Linear(512, 128))
    model = DistributedDataParallel(net)
    handle = cgx.compress(model, "auto", throttle_bit_s=_SLOW)
    for number in range(3):
        model.zero_grad()
        model(torch.tensor([number, rank, 5])).square().mean().backward()
    assert handle.report().reductions
    return digest(p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters())


def test_sparse_gradients_travel_exact() -> None:
    mine, theirs = run_processes(sparse, 2)
    assert mine == theirs


def incompressible(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(256, 256, dtype=torch.float64))
    handle = cgx.compress(model, "auto")
    assert handle.session is None, "fp64 travels exact, whatever the link"


def test_a_model_with_nothing_to_compress_is_left_alone() -> None:
    run_processes(incompressible, 2)


def failing(rank: int) -> str:
    model = wide(rank)
    handle = cgx.compress(model, "auto", throttle_bit_s=_SLOW)
    if rank == 1:
        handle.session.close()  # as if its connections broke between two steps
    for _ in range(20):
        try:
            model.zero_grad()
            model(torch.ones(4, 128)).mean().backward()
        except cgx.TransportError as error:
            return str(error)
    return "no error"


def test_a_failure_reaches_every_rank_and_ends_the_session() -> None:
    for told in run_processes(failing, 2):
        assert told != "no error"


def resumed(rank: int) -> None:
    torch.manual_seed(0)
    slow_model, fast_model = wide(rank), wide(rank)
    slow_handle = cgx.compress(slow_model, "auto", throttle_bit_s=_SLOW)
    fast_handle = cgx.compress(fast_model, "auto")
    for number in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
        slow_model(x).mean().backward()
    for one, other in ((slow_handle, fast_handle), (fast_handle, slow_handle)):
        one.load_state_dict(other.state_dict())
    assert not any("probe" in name for name in slow_handle.state_dict()["reduction_index"])


def test_a_state_taken_where_it_compressed_loads_where_it_does_not_and_back() -> None:
    run_processes(resumed, 2)


def test_all_reduce_chooses_by_size_and_all_ranks_alike() -> None:
    mine, theirs = run_processes(by_size, 2)
    assert mine == theirs
    assert mine[0] == "off"
