"""`cgx.all_reduce` on real processes: what it reduces, how exactly, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import cgx
from cgx.torch import functional
from tests.harness import run_processes

SHAPES = {"matrix": (300, 200), "vector": (77,), "scalar": (), "empty": (0, 3)}


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.to(expected.dtype) - expected).abs().square().sum()
    return float(difference / expected.abs().square().sum())


def _mappings(rank: int, world_size: int) -> list[list[float]]:
    for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / world_size)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            tensors = {name: mine(rank, shape, dtype) for name, shape in SHAPES.items()}
            before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            cgx.all_reduce(tensors, "uniform:8", op=op)
            for name, shape in SHAPES.items():
                assert tensors[name].data_ptr() == before[name]  # in place
                expected = sum(mine(r, shape, dtype).double() for r in range(world_size)) * factor
                if tensors[name].numel():
                    bound = 1e-28 if dtype is torch.float64 else 2e-4
                    assert relative_error(tensors[name], expected) < bound, (op, dtype, name)
    return [tensors["matrix"].flatten()[:50].tolist()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mappings_of_every_dtype(world_size: int) -> None:
    results = run_processes(_mappings, world_size, world_size)
    assert all(result == results[0] for result in results)


def _single_tensors(rank: int) -> None:
    transposed = mine(rank, (64, 96), torch.float32).t()
    assert not transposed.is_contiguous()
    cgx.all_reduce(transposed, "uniform:8")
    expected = (mine(0, (64, 96), torch.float64) + mine(1, (64, 96), torch.float64)).t()
    assert relative_error(transposed, expected) < 2e-4

    every_other = mine(rank, (100, 4), torch.float32)
    untouched = every_other[1::2].clone()
    cgx.all_reduce(every_other[::2], "uniform:8")
    assert torch.equal(every_other[1::2], untouched)

    turning = mine(rank, (40,), torch.complex64)
    cgx.all_reduce(turning)
    assert relative_error(turning, mine(0, (40,), torch.complex64) + mine(1, (40,), torch.complex64)) < 1e-12

    constant = torch.full((1000,), 3.0)
    cgx.all_reduce(constant, "uniform:1")
    assert torch.equal(constant, torch.full((1000,), 6.0))

    errors = []
    for spec in ("uniform:2", "uniform:4", "uniform:8", "bf16", "identity", "uniform:4+uniform:8", cgx.Uniform(4, 256)):
        x = mine(rank, (5000,), torch.float32)
        cgx.all_reduce(x, spec)
        errors.append(relative_error(x, mine(0, (5000,), torch.float64) + mine(1, (5000,), torch.float64)))
    assert errors[0] > errors[1] > errors[5] > errors[2] > errors[3] > errors[4]
    assert len(functional._sessions) == 1  # one pair of connections, whatever was reduced


def test_single_tensors_of_every_kind() -> None:
    run_processes(_single_tensors, 2)


def _repeats(rank: int) -> tuple[list[float], list[float]]:
    drawn = []
    for _ in range(2):
        x = mine(rank, (2000,), torch.float32)
        cgx.all_reduce(x)
        drawn.append(x.tolist())
    return drawn[0], drawn[1]


def test_random_bits_change_with_every_call() -> None:
    (first, second), (other_first, other_second) = run_processes(_repeats, 2)
    assert first != second
    assert (first, second) == (other_first, other_second)


def _sub_groups(rank: int) -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.full((100,), float(rank))
    cgx.all_reduce(x, group=groups[rank // 2])
    cgx.all_reduce(x, "identity", op=dist.ReduceOp.AVG)
    return x[0].item()


def test_sub_groups_side_by_side() -> None:
    assert run_processes(_sub_groups, 4) == [3.0] * 4


def _refusals(rank: int) -> list[str]:
    x = torch.randn(10)
    calls: list[tuple[Any, ...]] = [
        ((x,), {"op": dist.ReduceOp.MAX}),
        ((torch.arange(3),), {}),
        (([1.0],), {}),
        ((torch.randn(3, device="meta"),), {}),
        ((x, "uniform:4/bits=3"), {}),
        ((x, 4), {}),
    ]
    said = []
    for arguments, options in calls:
        with pytest.raises(cgx.SpecError) as caught:
            cgx.all_reduce(*arguments, **options)
        said.append(str(caught.value))
    return said


def test_refusals_say_what_was_found() -> None:
    (said,) = run_processes(_refusals, 1)
    for text, part in zip(
        said,
        ["SUM and AVG", "torch.int64", "found list", "on meta", "cannot use option 'bits=3'", "found 4"],
        strict=True,
    ):
        assert part in text


def test_without_a_process_group() -> None:
    with pytest.raises(cgx.SpecError, match="init_process_group first"):
        cgx.all_reduce(torch.randn(3))
