"""Runs of elements between an array of any dtype and an fp32 scratch block, with the odd elements at the end.

``raw`` is a spare array of eight elements in the array's dtype: the last, incomplete vector goes through it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numpy as np

from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.floats import F32, jit, load, store


@jit
def load_run(x, offset, n, scale, residual, state, owed, block, raw):
    """``block[:n] = x * scale + residual`` in fp32 (no residual unless ``owed``)."""
    whole = n - n % 8
    factor = v.splat_f32(scale)

    for i in range(0, whole, 8):
        lanes = load(x, offset + i) * factor
        if owed:
            lanes = lanes + v.load_f32(residual, state + i)
        v.store_f32(block, i, lanes)
    if whole < n:
        for i in range(n - whole):
            raw[i] = x[offset + whole + i]
        v.store_f32(block, whole, load(raw, 0) * factor)
        if owed:
            for i in range(whole, n):
                block[i] += residual[state + i]


@jit
def add_run(x, offset, n, total, raw):
    """``total[:n] += x`` in fp32."""
    whole = n - n % 8
    for i in range(0, whole, 8):
        v.store_f32(total, i, v.load_f32(total, i) + load(x, offset + i))
    if whole < n:
        for i in range(n - whole):
            raw[i] = x[offset + whole + i]
        v.store_f32(total, whole, v.load_f32(total, whole) + load(raw, 0))


@jit
def store_run(values, first, n, out, offset, raw):
    """``out[offset + first:offset + n] = values[first:n]``, rounded to the format of ``out``."""
    whole = n - n % 8
    for i in range(first, whole, 8):
        store(out, offset + i, v.load_f32(values, i))
    if whole < n:
        store(raw, 0, v.load_f32(values, whole))
        for i in range(n - whole):
            out[offset + whole + i] = raw[i]


@jit
def keep_residual(block, room, n, residual, state):
    """``residual = block[:n] - block[room:]``, sent less decoded; a poisoned element owes nothing."""
    for i in range(n):
        lost = block[i] - block[room + i]
        residual[state + i] = lost if abs(lost) < F32(np.inf) else F32(0)
