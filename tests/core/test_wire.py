"""Sizes of rows, and heads that are refused when anything about them is wrong."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cgx.core.spec import ITEMSIZE, Cast, Dtype, Identity, Spec, Uniform
from cgx.core.wire import HEAD_NBYTES, Head, align, row_nbytes
from cgx.errors import WireError
from tests.strategies import ALL_UNIFORM, DTYPES, SIZES

TAG = 0xFEDCBA9876543210


def _head(*, used_nbytes: int = 40, room_nbytes: int = 40) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    wire = np.full(room_nbytes, 0xEE, np.uint8)
    Head(used_nbytes, TAG).write(wire)
    return wire


def test_align() -> None:
    assert [align(n) for n in (0, 1, 7, 8, 9, 16)] == [0, 8, 8, 8, 16, 16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_rows(dtype: Dtype) -> None:
    """Counted otherwise than in the code: pairs, then 4 * bits bytes for each 32 elements begun."""
    for spec in ALL_UNIFORM:
        for numel in SIZES:
            pairs = sum(1 for _ in range(0, numel, spec.block_size))
            tiles = sum(1 for _ in range(0, numel, 32))
            nbytes = pairs * {"fp32": 8, "bf16": 4}[spec.scale] + tiles * 4 * spec.bits
            assert row_nbytes(spec, numel, dtype) == nbytes + -nbytes % 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_blocks(dtype: Dtype) -> None:
    for numel in SIZES:
        assert row_nbytes(Identity(), numel, dtype) == align(numel * ITEMSIZE[dtype])
        assert row_nbytes(Cast(), numel, dtype) == align(numel * 2)


@pytest.mark.parametrize(
    ("spec", "numel", "nbytes"),
    [
        (Uniform(4, 128), 4096, 4096 // 2 + 32 * 4),  # 4.25 bits per element
        (Uniform(4, 128, scale="fp32"), 4096, 4096 // 2 + 32 * 8),
        (Uniform(1, 32), 1, 8),
        (Uniform(8, 65536), 65536, 65536 + 8),  # a pair of 4 bytes, padded
        (Identity(), 0, 0),
    ],
)
def test_pinned_sizes(spec: Spec, numel: int, nbytes: int) -> None:
    assert row_nbytes(spec, numel, "fp32") == nbytes


def test_head_round_trips() -> None:
    wire = _head(used_nbytes=24)
    assert Head.read(wire, tag=TAG, source="test") == 24
    assert (wire[HEAD_NBYTES:] == 0xEE).all()
    assert wire[:HEAD_NBYTES].tobytes() == struct.pack("<BBHIQ", 0xC6, 1, 0, 24, TAG)


def test_reserved_bytes_are_ignored() -> None:
    wire = _head()
    wire[2:4] = 0xFF
    assert Head.read(wire, tag=TAG, source="test") == 40


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (0, 0xC7, "head 0xc7 version 1, expected 0xc6"),
        (1, 2, "version 2, expected 0xc6 version 1"),
        (8, 0x11, "of another reduction"),
        (15, 0x00, "of another reduction"),
        (4, 41, "announces 41 bytes, 40 were received"),
        (4, 15, "announces 15 bytes"),
        (4, 0, "announces 0 bytes"),
        (7, 0x80, "40 were received"),
    ],
)
def test_changed_head_is_refused(offset: int, value: int, said: str) -> None:
    wire = _head()
    wire[offset] = value
    with pytest.raises(WireError, match="bucket 3, from rank 1") as error:
        Head.read(wire, tag=TAG, source="bucket 3, from rank 1")
    assert said in str(error.value)


@pytest.mark.parametrize("nbytes", [0, 1, 15])
def test_truncated_head_is_refused(nbytes: int) -> None:
    with pytest.raises(WireError, match=f"{nbytes} bytes is shorter than its head"):
        Head.read(_head()[:nbytes], tag=TAG, source="test")
