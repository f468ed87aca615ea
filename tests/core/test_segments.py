"""Who owns what is a function of the parameter and the world size, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.core.random import name_hash
from cgx.core.segments import (
    BUFFER,
    CARRIERS,
    NUMEL,
    STRIPE_NUMEL,
    Segment,
    SegmentTable,
    single_row,
)
from cgx.core.spec import EXACT, ITEMSIZE, PhaseSpecs, Uniform


def _segment(numel: int, *, name: str = "w", specs: PhaseSpecs = EXACT) -> Segment:
    return Segment(name, (numel,), "fp32", specs)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 5), (7, 11), (2, 3, 5, 7)], ids=str)
def test_numel(shape: tuple[int, ...]) -> None:
    segment = Segment("w", shape, "fp16", EXACT)
    assert segment.numel == np.zeros(shape).size
    assert len(segment.owners(3)) == (1 if segment.numel else 0)


@given(st.integers(0, 200_000), st.integers(1, 40), st.text(max_size=20))
def test_stripes_are_dealt_in_turn(numel: int, world_size: int, name: str) -> None:
    owners = _segment(numel, name=name).owners(world_size)
    assert len(owners) == -(-numel // STRIPE_NUMEL)
    assert ((owners >= 0) & (owners < world_size)).all()
    assert (np.diff(owners) % world_size == 1 % world_size).all()
    assert not len(owners) or owners[0] == name_hash(name) % world_size


def test_first_owners_of_many_parameters_are_spread() -> None:
    """Small layers would otherwise all fall to rank 0: each of 8 ranks gets 1000 +- 5 standard deviations of 8000."""
    first = [int(_segment(1, name=f"block.{i}.weight").owners(8)[0]) for i in range(8000)]
    assert np.abs(np.bincount(first, minlength=8) - 1000).max() < 5 * np.sqrt(8000 / 8 * 7 / 8)


@pytest.mark.parametrize("block_size", [32, 4096, 8192, 65536])
def test_stripes_hold_whole_blocks_of_both_phases(block_size: int) -> None:
    for specs in (
        PhaseSpecs(Uniform(block_size=block_size), Uniform()),
        PhaseSpecs(Uniform(), Uniform(block_size=block_size)),
    ):
        segment = _segment(1, specs=specs)
        assert segment.stripe_numel == max(4096, block_size)
        assert segment.stripe_numel % block_size == 0


def test_an_owner_can_be_named() -> None:
    segment = Segment("w", (10_000,), "fp32", EXACT, owner=2)
    assert segment.owners(4).tolist() == [2, 2, 2]


def test_pinned_owners() -> None:
    """Ownership is part of the wire format."""
    assert _segment(20_000, name="layer.weight").owners(4).tolist() == [3, 0, 1, 2, 3]


def test_carriers_have_the_size_of_their_dtype() -> None:
    assert {dtype: carrier.itemsize for dtype, carrier in CARRIERS.items()} == ITEMSIZE


def test_table() -> None:
    table = single_row(70, wire_nbytes=48, dtype="bf16")
    assert (len(table), table.numel, table.wire_nbytes, table.dtype) == (1, 70, 48, "bf16")
    rows = np.zeros((3, 6), np.int64)
    rows[:, NUMEL], rows[:, BUFFER] = (4, 0, 5), (0, 4, 4)
    assert SegmentTable(rows, 0, "fp32").numel == 9
