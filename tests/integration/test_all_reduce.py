"""`cgx.all_reduce`: tensors and mappings reduced by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cgx
from cgx.collectives.base import Op
from cgx.core.plan import Parameter, to_specs
from cgx.core.segments import Segment
from cgx.core.spec import parse_specs
from cgx.torch.compat import to_array
from cgx.torch.session import Session
from tests.conformance.oracle import reduce_by_oracle
from tests.conformance.ranks import Settings
from tests.harness import run_processes
from tests.integration.training import digest
from tests.integration.zoo import generator, mlp

FINE = "uniform:8/block=32/rounding=nearest/scale=fp32"


def random(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that differs between ranks."""
    return torch.randn(*shape, generator=generator(rank, *shape), dtype=dtype)


def exact_sum(tensor: Tensor) -> Tensor:
    """Return the sum over ranks in double precision."""
    total = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).contiguous()
    dist.all_reduce(total)
    return total


def check(tensor: Tensor, expected: Tensor, allowed: float) -> None:
    """Compare with the sum; `allowed` is relative to its largest element."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    off = (tensor.detach().to(expected.dtype) - expected).abs().max().item() if expected.numel() else 0.0
    assert off <= allowed * largest


def single(rank: int) -> list[str]:
    """Reduce tensors of many shapes and strides, one at a time."""
    shapes: dict[str, Callable[[], Tensor]] = {
        "matrix": lambda: random(rank, 100, 90),
        "vector": lambda: random(rank, 77),
        "scalar": lambda: random(rank, 1).squeeze(),
        "empty": lambda: torch.empty(0, 5),
        "transposed": lambda: random(rank, 50, 60).t(),
        "every other": lambda: random(rank, 100, 20)[::2],
        "column": lambda: random(rank, 100, 20)[:, 3],
        "in the middle": lambda: random(rank, 5000)[13:4500],
        "channels last": lambda: random(rank, 2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "large": lambda: random(rank, 3, 700, 701),
    }
    digests = []
    for make in shapes.values():
        tensor = make()
        expected = exact_sum(tensor)
        assert cgx.all_reduce(tensor, FINE) is None
        check(tensor, expected, 0.03)
        digests.append(digest([tensor.contiguous()]))
    return digests


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_shape_and_stride_is_reduced_in_place(world_size: int) -> None:
    results = run_processes(single, world_size)
    assert all(result == results[0] for result in results)


def only_its_elements(rank: int) -> None:
    base = torch.full((60, 60), 7.0)
    cgx.all_reduce(base[1:50, 2:58:3])
    changed = base != 7.0
    assert changed.sum() == base[1:50, 2:58:3].numel()
    assert changed[1:50, 2:58:3].all()


def test_a_view_is_changed_and_nothing_around_it() -> None:
    run_processes(only_its_elements, 2)


def many_dtypes(rank: int) -> str:
    """A mapping of dtypes, shapes and strides, twice: exact where no kernel reads the dtype."""
    values = {
        "a": random(rank, 64, 64),
        "b": random(rank, 64, 64).to(torch.bfloat16),
        "c": random(rank, 70).to(torch.float16),
        "d": random(rank, 64, 64, dtype=torch.float64),
        "e": random(rank, 40, 41).t(),
        "f": torch.complex(random(rank, 64, 64), random(rank, 64, 64)),
        "g": random(rank, 9, dtype=torch.float64).to(torch.complex128),
        "h": torch.empty(0),
        "i": torch.full((33, 65), rank + 1.0),
    }
    allowed = {"d": 1e-15, "f": 1e-6, "g": 1e-15, "i": 0.0}
    for _ in range(2):
        expected = {name: exact_sum(tensor) for name, tensor in values.items()}
        cgx.all_reduce(values, FINE)
        for name, tensor in values.items():
            check(tensor, expected[name], allowed.get(name, 0.03))
    assert values["b"].dtype is torch.bfloat16
    assert not values["e"].is_contiguous()
    return digest(torch.view_as_real(v.contiguous()) if v.is_complex() else v.contiguous() for v in values.values())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mapping_of_all_dtypes(world_size: int) -> None:
    assert len(set(run_processes(many_dtypes, world_size))) == 1


def against_the_oracle(rank: int, op_name: str, spec: str, dtype: torch.dtype) -> Any:
    """Return the input, and what two calls in a row made of it."""
    op = getattr(dist.ReduceOp, op_name)
    before = random(rank, 130, 100).to(dtype)
    first, second = before.clone(), before.clone()
    cgx.all_reduce(first, spec, op=op)
    cgx.all_reduce(second, spec, op=op)
    return [to_array(tensor.view(-1)).copy() for tensor in (before, first, second)]


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("spec", ["uniform:4", "uniform:2/rounding=stochastic+bf16", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_the_oracles_and_each_call_draws_new_bits(op: str, spec: str, dtype: torch.dtype) -> None:
    results = run_processes(against_the_oracle, 3, op, spec, dtype)
    short = "fp32" if dtype is torch.float32 else "bf16"
    specs = parse_specs(spec)
    name = f"tensor [130, 100] {short} {specs}"
    segment = Segment(name, (130, 100), short, specs)
    inputs = [{name: before} for before, _, _ in results]
    for call in range(2):
        expected = reduce_by_oracle(inputs, [segment], Settings(Op[op], reduction_index=call))[name]
        for result in results:
            assert result[1 + call].tobytes() == expected.tobytes()
    assert (results[0][1].tobytes() == results[0][2].tobytes()) == (spec == "identity")


def leaves(rank: int) -> None:
    """Average weights, as local-step methods do: leaves that require grad, with or without no_grad."""
    torch.manual_seed(rank)
    module = mlp()
    expected = {name: exact_sum(p) / 2 for name, p in module.named_parameters()}
    cgx.all_reduce(dict(module.named_parameters()), FINE, op=dist.ReduceOp.AVG)
    for name, parameter in module.named_parameters():
        check(parameter, expected[name], 0.03)
        assert parameter.requires_grad
        assert parameter.grad is None
    cgx.all_reduce(module[0].weight.t(), FINE)
    module(torch.ones(2, 64)).sum().backward()
    cgx.all_reduce({n: p.grad for n, p in module.named_parameters()}, FINE)


def test_weights_and_gradients_of_a_module() -> None:
    run_processes(leaves, 2)


def refused(rank: int) -> None:
    x = torch.ones(64, 64)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND):
        with pytest.raises(cgx.SpecError, match="SUM and AVG"):
            cgx.all_reduce(x, op=op)
    bad: list[Any] = [
        torch.ones(64, 64, dtype=torch.int32),
        torch.ones(64, dtype=torch.bool),
        torch.ones(64, 64).to_sparse(),
        torch.ones(64, 64, device="meta"),
        np.ones(64),
        [x],
        {"x": x, "y": 3},
    ]
    for tensors in bad:
        with pytest.raises(cgx.SpecError):
            cgx.all_reduce(tensors)
    for spec in ("uniform:0", "uniform:x", "", "uniform:4+uniform:4+uniform:4", None, 4):
        with pytest.raises(cgx.SpecError):
            cgx.all_reduce(x, spec)  # type: ignore[arg-type]
    with pytest.raises(cgx.SpecError):
        cgx.all_reduce(x[:1].expand(64, 64))  # elements that share memory
    assert (x == 1).all()
    cgx.all_reduce(x)
    assert (x == 2).all()


def test_what_cannot_be_reduced_is_refused_before_anything_moves() -> None:
    run_processes(refused, 2)


def without_a_group() -> None:
    cgx.all_reduce(torch.ones(3))


def test_without_torch_distributed_it_says_what_to_do() -> None:
    with pytest.raises(cgx.SpecError, match="init_process_group"):
        without_a_group()


def groups(rank: int) -> None:
    """Overlapping groups, several specs, in turns."""
    pair, rest = dist.new_group([0, 2]), dist.new_group([1, 2, 3])
    for spec in ("uniform:4", "bf16", "uniform:8+identity"):
        for group, ranks in ((pair, (0, 2)), (rest, (1, 2, 3)), (None, (0, 1, 2, 3))):
            x = {"a": torch.full((50, 60), rank + 1.0), "b": torch.full((7,), 2.0 * rank)}
            if rank not in ranks:
                with pytest.raises(cgx.SpecError, match="not in the group"):
                    cgx.all_reduce(x, spec, group=group)
                continue
            cgx.all_reduce(x, spec, group=group)
            assert (x["a"] == sum(ranks) + len(ranks)).all()
            assert (x["b"] == 2 * sum(ranks)).all()


def test_groups_of_some_ranks_and_a_spec_for_each_call() -> None:
    run_processes(groups, 4)


def alone(rank: int) -> None:
    x = torch.full((64, 64), 1.1)
    cgx.all_reduce(x, "uniform:1", group=[dist.new_group([r]) for r in range(dist.get_world_size())][rank])
    assert (x == 1.1).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_rank_in_a_group_keeps_its_tensor(world_size: int) -> None:
    run_processes(alone, world_size)


def poisoned(rank: int) -> None:
    x = torch.ones(64, 64)
    if rank == 1:
        x[10, 10] = float("inf")
    cgx.all_reduce(x)
    bad = ~torch.isfinite(x.view(-1))
    assert bad.nonzero().view(-1).tolist() == list(range(640, 768))


def test_infinity_on_one_rank_is_on_all_in_its_block() -> None:
    run_processes(poisoned, 3)


def debugged(rank: int) -> None:
    """A group that TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=timedelta(seconds=17))
    x = {"a": torch.full((64, 64), rank + 1.0), "b": torch.full((9,), rank + 1.0, dtype=torch.float64)}
    cgx.all_reduce(x, group=group)
    assert all((tensor == 3).all() for tensor in x.values())


def test_a_group_wrapped_for_debugging() -> None:
    run_processes(debugged, 2)


def many_signatures(rank: int) -> int:
    """Names, shapes, dtypes and specs that were never seen before, in one session."""
    import threading

    for number in range(12):
        x = {f"p{i}": torch.full((number + 1, 40 + i), 1.0 + rank) for i in range(number % 4 + 1)}
        cgx.all_reduce(x, "uniform:4" if number % 2 else "bf16")
        assert all((tensor == 3).all() for tensor in x.values())
    return sum(thread.name.startswith("cgx") for thread in threading.enumerate())


def test_new_signatures_open_no_new_session() -> None:
    assert run_processes(many_signatures, 2) == [1, 1]


def reduce_scatter(rank: int) -> tuple[list[float], int]:
    shape = (64, 80)
    names = ["first", "second"]
    plan = dict.fromkeys(names, to_specs("uniform:8"))
    session = Session(dist.group.WORLD, [Parameter(n, shape, "fp32") for n in names], {"given": plan})
    mine = torch.randn(2, 64 * 80, generator=torch.Generator().manual_seed(rank))
    theirs = torch.randn(2, 64 * 80, generator=torch.Generator().manual_seed(1 - rank))
    flat = mine.clone().view(-1)
    session.reduce_flat(flat, names, [shape, shape], Op.SUM, label="reduce-scatter", owners=[0, 1]).wait()
    reduced = flat.view(2, -1)
    assert torch.equal(reduced[1 - rank], mine[1 - rank])
    error = (reduced[rank] - mine[rank] - theirs[rank]).square().sum() / (mine[rank] + theirs[rank]).square().sum()
    assert 0 < error < 1e-4  # the peer's part came in eight bits, the own one exact
    sent = session.report().wire_nbytes
    session.close()
    return reduced[rank][:3].tolist(), sent


def test_reduce_scatter_leaves_each_owner_its_sum_for_one_phase_of_bytes() -> None:
    (_, sent), (_, other_sent) = run_processes(reduce_scatter, 2)
    assert sent == other_sent
    one_copy = 64 * 80 * 8.25 / 8
    assert one_copy < sent < one_copy + 200  # head, ticket and the plan's digest
