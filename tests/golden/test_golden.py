"""The wire format is pinned: same bytes from the oracle and the kernels, same numbers from any decoder."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cgx.compressors.base import OWN
from cgx.compressors.registry import compressor_for
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.segments import START, single_row
from tests.golden import oracle, plain
from tests.golden.cases import (
    CASES,
    INPUTS,
    NAME,
    REDUCE_CASES,
    REDUCTION,
    SEED,
    SENDER,
    STREAM,
    Case,
    ReduceCase,
    formula,
    keys,
)
from tests.kernels.compare import same_values
from tests.strategies import in_dtype

PINNED = {record["name"]: record for record in json.loads(oracle.FILE.read_text(encoding="utf-8"))}


def _decoded(name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(bytes.fromhex(PINNED[name]["decoded"]), np.float32)


def test_oracle_gives_the_pinned_file() -> None:
    assert {record["name"]: record for record in oracle.records()} == PINNED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_give_the_pinned_bytes(case: Case) -> None:
    codec = compressor_for(case.spec)
    nbytes = codec.row_nbytes(case.numel, case.dtype)
    table = single_row(case.numel, wire_nbytes=nbytes, dtype=case.dtype)
    table.rows[:, START] = case.start
    x = in_dtype(INPUTS[case.input](case.numel), case.dtype)
    wire, out = np.zeros(nbytes, np.uint8), np.zeros(case.numel, np.float32)
    codec.compress(x, wire, table, keys(), STREAM, scale=case.scale)
    assert wire.tobytes().hex() == PINNED[case.name]["payload"]
    codec.decompress(wire, out, table, keys(), STREAM)
    assert same_values(out, _decoded(case.name))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_decoder_gives_the_pinned_numbers(case: Case) -> None:
    key = plain.payload_key(name=NAME, seed=SEED, reduction=REDUCTION, phase=SCATTER, sender=SENDER)
    row = plain.Row(str(case.spec), case.numel, case.dtype, key, case.start)
    payload = bytes.fromhex(PINNED[case.name]["payload"])
    assert row.nbytes == len(payload)
    assert same_values(np.array(row.decode(payload), np.float32), _decoded(case.name))


@pytest.mark.parametrize("case", REDUCE_CASES, ids=lambda case: case.name)
def test_fused_reduce_gives_the_pinned_bytes(case: ReduceCase) -> None:
    scatter, gather = compressor_for(case.scatter), compressor_for(case.gather)
    table, table_out = (
        single_row(case.numel, wire_nbytes=codec.row_nbytes(case.numel, "fp32")) for codec in (scatter, gather)
    )
    room = table.wire_nbytes
    wires = np.zeros(case.world_size * room, np.uint8)
    for rank in range(case.world_size):
        x = formula(case.numel, salt=rank)
        scatter.compress(x, wires[rank * room :], table, keys(), stream(SCATTER, rank))
    own, out = formula(case.numel, salt=case.own_rank), np.zeros(table_out.wire_nbytes, np.uint8)
    scatter.reduce(
        wires, np.arange(case.world_size, dtype=np.int64) * room, own, out, table, table_out, keys(),
        into=gather, senders=[OWN if r == case.own_rank else stream(SCATTER, r) for r in range(case.world_size)],
        stream_out=stream(GATHER, case.own_rank), scale=case.scale,
    )  # fmt: skip
    assert out.tobytes().hex() == PINNED[case.name]["payload"]
    assert same_values(own, _decoded(case.name))
