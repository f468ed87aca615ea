"""Computes what the golden file holds, with the NumPy oracle alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.segments import CARRIERS, START, single_row
from cgx.core.spec import Uniform
from cgx.core.wire import WIRE_VERSION, row_nbytes
from cgx.kernels import reference
from cgx.kernels.reference import Bytes, from_f32, to_f32
from tests.golden.cases import (
    CASES,
    INPUTS,
    REDUCE_CASES,
    STREAM,
    Case,
    ReduceCase,
    formula,
    keys,
)
from tests.strategies import Floats, in_dtype

FILE = Path(__file__).with_name(f"wire-v{WIRE_VERSION}.json")


def encode(case: Case) -> tuple[Bytes, Floats]:
    """Payload of the row, and the float32 values it decodes to."""
    x = in_dtype(INPUTS[case.input](case.numel), case.dtype)
    nbytes = row_nbytes(case.spec, case.numel, case.dtype)
    wire, decoded = np.zeros(nbytes, np.uint8), np.zeros(case.numel, np.float32)
    if isinstance(case.spec, Uniform):
        rows = single_row(case.numel, wire_nbytes=nbytes).rows
        rows[:, START] = case.start
        reference.compress(x, wire, rows, keys(), STREAM, case.spec, scale=case.scale)
        reference.decompress(wire, decoded, rows, keys(), STREAM, case.spec)
        return wire, decoded
    on_wire = from_f32(to_f32(x), CARRIERS[getattr(case.spec, "dtype", case.dtype)])
    wire[: on_wire.nbytes] = on_wire.view(np.uint8)
    return wire, to_f32(on_wire)


def reduce(case: ReduceCase) -> tuple[list[Bytes | None], Bytes, Floats]:
    """Payloads that arrive, the payload that leaves, and what the owner keeps."""
    sizes = [row_nbytes(spec, case.numel, "fp32") for spec in (case.scatter, case.gather)]
    rows = single_row(case.numel, wire_nbytes=sizes[0]).rows
    senders = [stream(SCATTER, rank) for rank in range(case.world_size)]
    arriving: list[Bytes | None] = []
    for rank, sender in enumerate(senders):
        wire = np.zeros(sizes[0], np.uint8)
        reference.compress(formula(case.numel, salt=rank), wire, rows, keys(), sender, case.scatter)
        arriving.append(None if rank == case.own_rank else wire)
    own, leaving = formula(case.numel, salt=case.own_rank), np.zeros(sizes[1], np.uint8)
    reference.reduce(
        arriving, own, leaving, rows, rows, keys(), senders, stream(GATHER, case.own_rank),
        case.scatter, case.gather, scale=case.scale,
    )  # fmt: skip
    return arriving, leaving, own


def hex_of(array: np.ndarray[Any, Any]) -> str:
    """Bytes of an array in memory order."""
    return array.tobytes().hex()


def records() -> list[dict[str, str]]:
    """The content of the golden file."""
    found = []
    for case in CASES:
        payload, decoded = encode(case)
        found.append({"name": case.name, "payload": hex_of(payload), "decoded": hex_of(decoded)})
    for reduction in REDUCE_CASES:
        _, leaving, own = reduce(reduction)
        found.append({"name": reduction.name, "payload": hex_of(leaving), "decoded": hex_of(own)})
    return found


def text_of(found: list[dict[str, str]]) -> str:
    """One record a line, so that a difference shows which."""
    return "[\n" + ",\n".join(json.dumps(record) for record in found) + "\n]\n"
