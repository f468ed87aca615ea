"""The DDP door on real processes: replicas, invariance, exact paths and everyday uses of DDP."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import run_processes
from tests.integration.training import MODELS, Setup, Trained, batch, digest_of, pack, train, train_many, unpack

SMALL = {"bucket_cap_mb": 0.1}


def trained(setups: list[Setup], world_size: int = 2) -> list[list[Trained]]:
    """Results by setup, then by rank."""
    ranks = run_processes(train_many, world_size, pack(setups), timeout_seconds=100)
    return [list(results) for results in zip(*map(unpack, ranks), strict=True)]


def assert_replicas(results: list[Trained]) -> None:
    assert len({result.digest for result in results}) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_are_equal_after_200_steps(world_size: int) -> None:
    (results,) = trained([Setup(steps=200, ddp=SMALL)], world_size)
    assert_replicas(results)
    assert results[0].losses[-1] < 0.5 * results[0].losses[0]


def test_bits_do_not_depend_on_buckets_pieces_views_or_a_second_run() -> None:
    variants = [
        Setup(ddp=SMALL),
        Setup(ddp=SMALL),
        Setup(),
        Setup(ddp={"bucket_cap_mb": 0.02}),
        Setup(options={"piece_nbytes": 20_000}),
        Setup(ddp={"gradient_as_bucket_view": True}),
        Setup(ddp={"static_graph": True}),
        Setup(ddp={"find_unused_parameters": True}),
    ]
    results = trained(variants)
    assert len({rank.digest for ranks in results for rank in ranks}) == 1
    other_seed, other_spec = trained([Setup(options={"seed": 1}), Setup(how="uniform:5")])
    assert len({results[0][0].digest, other_seed[0].digest, other_spec[0].digest}) == 3


@pytest.mark.parametrize("error_feedback", [False, True])
def test_a_restart_continues_bit_for_bit(error_feedback: bool) -> None:
    setup = Setup(how="uniform:2", ddp=SMALL, options={"error_feedback": error_feedback})
    whole, first = trained([replace(setup, steps=7), replace(setup, steps=4)])
    saved = []
    for result in first:
        file = io.BytesIO()
        torch.save(result.states, file)
        file.seek(0)
        saved.append(torch.load(file, weights_only=True))
    (second,) = trained([replace(setup, steps=3, resume=(saved, 4))])
    assert [r.digest for r in second] == [r.digest for r in whole]
    (forgetful,) = trained(
        [
            replace(
                setup,
                steps=3,
                resume=(
                    [(*s[:2], s[2] | {"reduction_index": dict.fromkeys(s[2]["reduction_index"], 0)}) for s in saved],
                    4,
                ),
            )
        ]
    )
    assert forgetful[0].digest != whole[0].digest  # the counters matter


def test_accumulation_sends_once_per_step_and_equals_the_mean() -> None:
    stock, cgx_run, exact = trained(
        [Setup(how=None, micro_batches=3), Setup(micro_batches=3), Setup(how="off", micro_batches=3)]
    )
    assert_replicas(cgx_run)
    assert exact[0].digest == stock[0].digest
    assert cgx_run[0].report["raw_nbytes"] == 6 * sum(w.nbytes for w in cgx_run[0].weights)
    assert cgx_run[0].losses[-1] == pytest.approx(stock[0].losses[-1], rel=0.05)


def test_off_equals_stock_bit_for_bit() -> None:
    stock, off, removed = trained(
        [Setup(how=None, ddp=SMALL), Setup(how="off", ddp=SMALL), Setup(how={"*": "identity"}, ddp=SMALL)]
    )
    assert off[0].digest == stock[0].digest
    assert removed[0].digest == stock[0].digest
    assert off[0].report["wire_nbytes"] == 0


def test_unused_tied_frozen_scalar_and_empty_parameters() -> None:
    options = {"find_unused_parameters": True}
    stock, results = trained([Setup(how=None, model="branches", ddp=options), Setup(model="branches", ddp=options)])
    assert_replicas(results)
    for name, gradient in results[0].grads.items():
        expected = stock[0].grads[name]
        assert (gradient is None) == (expected is None), name
        if expected is not None and not expected.any():
            assert not gradient.any(), f"{name} became noise"
    assert results[0].losses[-1] == pytest.approx(stock[0].losses[-1], rel=0.05)


def test_several_dtypes_and_complex_gradients() -> None:
    stock, results = trained([Setup(how=None, model="mixed"), Setup(model="mixed")])
    assert_replicas(results)
    exact = {"fp64.weight", "fp64.bias", "phase"}
    for name, gradient in results[0].grads.items():
        assert gradient.dtype == stock[0].grads[name].dtype
        assert torch.isfinite(torch.view_as_real(gradient) if gradient.is_complex() else gradient).all()
    (once_stock, once) = trained([Setup(how=None, model="mixed", steps=1), Setup(model="mixed", steps=1)])
    for name in exact:
        assert torch.equal(once[0].grads[name], once_stock[0].grads[name]), f"{name} is not exact"
    for name in ("fp16", "bf16.weight", "fp32.weight"):
        assert not torch.equal(once[0].grads[name], once_stock[0].grads[name]), f"{name} was not compressed"
        error = (once[0].grads[name].float() - once_stock[0].grads[name].float()).square().sum()
        assert error < 0.05 * once_stock[0].grads[name].float().square().sum()


@pytest.mark.parametrize("model", ["conv", "sparse"])
def test_channels_last_and_sparse_gradients(model: str) -> None:
    stock, results = trained([Setup(how=None, model=model), Setup(model=model)])
    assert_replicas(results)
    assert results[0].losses[-1] == pytest.approx(stock[0].losses[-1], rel=0.05)


def test_compress_may_be_called_after_the_first_steps() -> None:
    (results,) = trained([Setup(compress_after=3, ddp=SMALL)])
    assert_replicas(results)
    assert results[0].report["reductions"] > 0


def test_mapping_gives_each_layer_its_spec() -> None:
    (results,) = trained([Setup(how={"0.weight": "uniform:8", "2.*": "off", "*": "uniform:2+uniform:4"})])
    assert_replicas(results)
    assert results[0].report["plan"] == {
        "identity": 4,
        "uniform:8/block=128/rounding=dithered/scale=bf16": 1,
        "uniform:2/block=128/rounding=dithered/scale=bf16+uniform:4/block=128/rounding=dithered/scale=bf16": 1,
    }


def test_debug_detail_wraps_groups_and_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_processes(_train_under_debug, 2, timeout_seconds=100)
    assert len(set(results)) == 1


def _train_under_debug(rank: int) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return train(rank, Setup(steps=3)).digest


def test_one_rank_is_left_alone() -> None:
    stock, results = trained([Setup(how=None), Setup()], world_size=1)
    assert results[0].digest == stock[0].digest
    assert results[0].report["wire_nbytes"] == 0


def _nan_on_rank_one(rank: int) -> list[Any]:
    model = nn.Linear(64, 256, bias=False)
    ddp = DistributedDataParallel(model)
    cgx.compress(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = digest_of(model)
    x = batch(rank, 0, 0)
    if rank == 1:
        x[0, 3] = float("inf")
    scaler.scale(ddp(x).square().mean()).backward()
    grad = model.weight.grad
    assert grad is not None
    poisoned = torch.isnan(grad.view(-1, 128)).all(dim=1), torch.isfinite(grad.view(-1, 128)).all(dim=1)
    scaler.step(optimizer)
    scaler.update()
    return [
        digest_of(model) == before,
        scaler.get_scale(),
        bool((poisoned[0] | poisoned[1]).all()),
        bool(poisoned[0].any()),
    ]


def test_infinity_on_one_rank_skips_the_step_everywhere() -> None:
    for skipped, scale, is_whole_blocks, is_poisoned in run_processes(_nan_on_rank_one, 2):
        assert skipped
        assert scale == 2.0
        assert is_whole_blocks
        assert is_poisoned


def _two_models(rank: int) -> tuple[str, str]:
    torch.manual_seed(0)
    models = [MODELS["mlp"](), MODELS["mlp"]()]
    ddps = [DistributedDataParallel(m, bucket_cap_mb=0.1) for m in models]
    for ddp in ddps:
        cgx.compress(ddp)
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        metric = torch.tensor([1.0 + rank])
        loss = sum(ddp(batch(rank, step, i)).square().mean() for i, ddp in enumerate(ddps))
        loss.backward()  # both models' buckets interleave
        dist.all_reduce(metric)  # the user's own traffic
        assert metric.item() == 3.0
        optimizer.step()
    return digest_of(models[0]), digest_of(models[1])


def test_two_models_and_the_users_own_collectives() -> None:
    first, second = run_processes(_two_models, 2)
    assert first == second
    assert first[0] != first[1]


def _handle_life(rank: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MODELS["mlp"](), bucket_cap_mb=0.1)
    stock = DistributedDataParallel(MODELS["mlp"](), bucket_cap_mb=0.1)
    stock.module.load_state_dict(ddp.module.state_dict())
    handle = cgx.compress(ddp)
    assert cgx.compress(ddp, "uniform:2") is handle

    def grads(model: DistributedDataParallel) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(rank, 0, 0)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def same() -> bool:
        return all(torch.equal(a, b) for a, b in zip(grads(ddp), grads(stock), strict=True))

    assert not same()
    handle.remove()
    handle.remove()
    assert same()
    again = cgx.compress(ddp, "uniform:8")
    assert again is not handle
    assert not same()
    with pytest.raises(cgx.SpecError, match="does not fit: seed"):
        again.load_state_dict(again.state_dict() | {"seed": 5})
    with pytest.raises(cgx.SpecError, match="communication hook already"):
        other = DistributedDataParallel(nn.Linear(4, 4))
        other.register_comm_hook(None, _foreign_hook)
        cgx.compress(other)


def _foreign_hook(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_handles_come_and_go() -> None:
    run_processes(_handle_life, 2)


def _refreeze_and_checkpoint(rank: int) -> str:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    cgx.compress(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        model[0].weight.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        x = batch(rank, step, 0)
        y = torch.utils.checkpoint.checkpoint(ddp, x, use_reentrant=False) if step > 3 else ddp(x)
        y.square().mean().backward()
        optimizer.step()
    return digest_of(model)


def test_refrozen_layers_and_activation_checkpointing() -> None:
    assert len(set(run_processes(_refreeze_and_checkpoint, 2))) == 1


def _sub_group(rank: int) -> str | None:
    group = dist.new_group([0, 2])
    torch.manual_seed(rank % 2)
    if rank == 1:
        return None
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MODELS["mlp"](), process_group=group)
    handle = cgx.compress(ddp)
    for step in range(3):
        ddp(batch(rank, step, 0)).square().mean().backward()
    assert handle.report().world_size == 2
    return str([p.grad.double().sum().item() for p in ddp.parameters() if p.grad is not None])


def test_a_sub_group_of_ranks() -> None:
    first, nothing, third = run_processes(_sub_group, 3)
    assert nothing is None
    assert first == third


def _uneven_inputs(rank: int) -> str:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    cgx.compress(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ddp.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step, 0)).square().mean().backward()
            optimizer.step()
    return digest_of(model)


def test_join_with_uneven_inputs() -> None:
    assert len(set(run_processes(_uneven_inputs, 2))) == 1


def test_what_compress_refuses() -> None:
    with pytest.raises(cgx.SpecError, match=r"DistributedDataParallel model, found Linear"):
        cgx.compress(nn.Linear(2, 2))  # type: ignore[arg-type]
    for error in run_processes(_refusals, 1):
        assert "unknown spec" in error[0]
        assert "bits must be an integer from 1 to 8" in error[1]
        assert "matches no parameter" in error[2]


def _refusals(rank: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    said = []
    for how in ("unifrom:4", "uniform:9", {"nothing.*": "uniform:4"}):
        with pytest.raises(cgx.SpecError) as caught:
            cgx.compress(ddp, how)
        said.append(str(caught.value))
    return said
