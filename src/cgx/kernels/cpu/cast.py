"""Numba kernels of the codecs without blocks: elements travel in a dtype of their own (identity, bf16 cast).

``wire`` is the payload viewed in its dtype (a carrier of ``floats.py``); WIRE offsets are bytes all the same.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numpy as np

from cgx.core.segments import BUFFER, NUMEL, STATE, WIRE
from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.floats import F32, jit
from cgx.kernels.cpu.runs import add_run, keep_residual, load_run, store_run

_ZERO, _NO, _ONE = np.int64(0), np.bool_(False), F32(1)


@jit
def _pad(target, at, n, itemsize):
    """Zeroes the elements between a row and the next multiple of eight bytes."""
    for i in range(n, ((n * itemsize + 7) & -8) // itemsize):
        target[at + i] = 0


@jit
def compress(x, wire, rows, scale, residual, keep, scratch, spare, spare_wire, first, stop):
    """Writes ``x * scale + residual`` in the dtype of ``wire`` and, to ``keep`` it, the new residual."""
    block, raw, raw_wire = v.pointer(scratch), v.pointer(spare), v.pointer(spare_wire)
    source, target, owed = v.pointer(x), v.pointer(wire), v.pointer(residual)
    room = len(scratch) >> 1
    for r in range(first, stop):
        n, at, state = rows[r, NUMEL], rows[r, BUFFER], rows[r, STATE]
        to = rows[r, WIRE] // wire.itemsize
        load_run(source, at, n, scale, owed, state, keep, block, raw)
        store_run(block, _ZERO, n, target, to, raw_wire)
        if keep:
            # The decoded copy is kept one scratch half further on, where keep_residual looks for it.
            for i in range(n):
                block[room + i] = block[i]
            load_run(target, to, n, _ONE, block, _ZERO, _NO, block, raw_wire)
            for i in range(n):
                sent = block[i]
                block[i] = block[room + i]
                block[room + i] = sent
            keep_residual(block, room, n, owed, state)
        _pad(target, to, n, wire.itemsize)


@jit
def decompress(wire, out, rows, add, scratch, spare, spare_wire, first, stop):
    """Reads rows into ``out``, replacing or adding."""
    block, raw, raw_wire = v.pointer(scratch), v.pointer(spare), v.pointer(spare_wire)
    source, target = v.pointer(wire), v.pointer(out)
    for r in range(first, stop):
        n, at, row = rows[r, NUMEL], rows[r, BUFFER], rows[r, WIRE] // wire.itemsize
        if add:
            load_run(target, at, n, _ONE, block, _ZERO, _NO, block, raw)
            add_run(source, row, n, block, raw_wire)
        else:
            load_run(source, row, n, _ONE, block, _ZERO, _NO, block, raw_wire)
        store_run(block, _ZERO, n, target, at, raw)


@jit
def reduce(
    wires, starts, own, wire_out, rows, wire_rows_out, own_rank, scale, encode, scratch, spare,
    spare_wire, first, stop,
):  # fmt: skip
    """Sums all ranks' rows in rank order in fp32, scales, writes them, and leaves what was written in ``own``."""
    total, raw, raw_wire = v.pointer(scratch), v.pointer(spare), v.pointer(spare_wire)
    received, mine, payload = v.pointer(wires), v.pointer(own), v.pointer(wire_out)
    for r in range(first, stop):
        n, at, row = rows[r, NUMEL], rows[r, BUFFER], rows[r, WIRE]
        for s in range(len(starts)):
            theirs = (starts[s] + row) // wires.itemsize
            if s == own_rank and s == 0:
                load_run(mine, at, n, _ONE, total, _ZERO, _NO, total, raw)
            elif s == own_rank:
                add_run(mine, at, n, total, raw)
            elif s == 0:
                load_run(received, theirs, n, _ONE, total, _ZERO, _NO, total, raw_wire)
            else:
                add_run(received, theirs, n, total, raw_wire)
        for i in range(n):
            total[i] *= scale
        if encode:
            to = wire_rows_out[r] // wire_out.itemsize
            store_run(total, _ZERO, n, payload, to, raw_wire)
            _pad(payload, to, n, wire_out.itemsize)
            load_run(payload, to, n, _ONE, total, _ZERO, _NO, total, raw_wire)
        store_run(total, _ZERO, n, mine, at, raw)
