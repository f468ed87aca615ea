"""A conformance run of some seconds: kernels against the oracle, and a reduction between two ranks."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import BufferPool, Op, Reduction, stages_of
from cgx.collectives.layout import cut
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.compressors.base import OWN
from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, stream
from cgx.core.segments import CARRIERS, Segment, single_row
from cgx.core.spec import Dtype, PhaseSpecs, Uniform
from cgx.core.wire import row_nbytes
from cgx.errors import CgxError
from cgx.kernels import dispatch, reference
from cgx.transports.threads import ThreadHub

Array = NDArray[Any]

# Every number of bits, and with them every rounding and scale.
_SPECS = (
    Uniform(4),
    Uniform(1, rounding="nearest"),
    Uniform(2, rounding="stochastic"),
    Uniform(3, block_size=64, scale="fp32"),
    Uniform(5, block_size=512, rounding="nearest", scale="fp32"),
    Uniform(6, rounding="stochastic", scale="fp32"),
    Uniform(7, block_size=32),
    Uniform(8, block_size=4096),
)
_DTYPES: tuple[Dtype, ...] = ("fp32", "fp16", "bf16")
_NUMELS = (1, 128, 4096 + 37)
_RANKS = 2
_REDUCED_NUMEL = 100_003
_PIECE_NBYTES = 1 << 17  # several pieces
# Two passes of 4 bits on normal values lose 0.016 of the mean's energy; a wrong one loses far more.
_LARGEST_ERROR = 0.03


class ConformanceError(CgxError):
    """This machine computes something else than the wire format says."""


def compare_kernels() -> int:
    """Runs encode, decode and reduce beside the NumPy oracle and returns how often they were equal.

    Raises:
        ConformanceError: A byte differs; the message says in which case.

    Cost:
        A second or two; once per installation, several more to compile.
    """
    cases = list(itertools.product(_SPECS, _DTYPES, _NUMELS))
    for spec, dtype, numel in cases:
        for what, found, expected in _run_case(spec, dtype, numel):
            if found.tobytes() != expected.tobytes():
                raise ConformanceError(
                    f"{what} of {numel} {dtype} elements with {spec} differs from the NumPy oracle: "
                    "ranks on this machine would not agree with others"
                )
    return 3 * len(cases)


def _run_case(spec: Uniform, dtype: Dtype, numel: int) -> list[tuple[str, Array, Array]]:
    """Returns (operation, result of the kernels, result of the oracle) for one case."""
    generator = np.random.default_rng(numel)
    x, own = (reference.from_f32(generator.standard_normal(numel, np.float32), CARRIERS[dtype]) for _ in range(_RANKS))
    nbytes = row_nbytes(spec, numel, dtype)
    table = single_row(numel, wire_nbytes=nbytes, dtype=dtype)
    keys, sent = _keys(), stream(SCATTER, 1)

    wires = [np.zeros(nbytes, np.uint8) for _ in range(2)]
    dispatch.uniform_compress(x, wires[0], table, keys, sent, spec, scale=1.0, residual=None)
    reference.compress(x, wires[1], table.rows, keys, sent, spec)

    outs = [own.copy() for _ in range(2)]
    dispatch.uniform_decompress(wires[1], outs[0], table, keys, sent, spec, add=True)
    reference.decompress(wires[1], outs[1], table.rows, keys, sent, spec, add=True)

    sums = [np.zeros(nbytes, np.uint8) for _ in range(2)]
    received = np.concatenate([np.zeros(nbytes, np.uint8), wires[1]])
    dispatch.uniform_reduce(
        received, np.array([0, nbytes]), own.copy(), sums[0], table, table, keys, spec, spec,
        senders=[OWN, sent], stream_out=stream(GATHER, 0), scale=0.5, encode=True,
    )  # fmt: skip
    reference.reduce(
        [None, wires[1]], own.copy(), sums[1], table.rows, table.rows, keys,
        [stream(SCATTER, 0), sent], stream(GATHER, 0), spec, spec, scale=0.5,
    )  # fmt: skip
    return [
        ("encoding", wires[0], wires[1]),
        ("decoding", outs[0], outs[1]),
        ("the reduction", sums[0], sums[1]),
    ]


def _keys() -> NDArray[np.uint64]:
    hashes = np.array([name_hash("weight")], np.uint64)
    return parameter_keys(0, hashes, np.zeros(1, np.uint64))


def reduce_between_threads() -> float:
    """Averages a tensor over two ranks, which are threads here, and returns the error of the mean.

    Returns:
        Relative squared error: |reduced - exact|^2 / |exact|^2.

    Raises:
        ConformanceError: The ranks end with different bits, or far from the mean.
    """
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((_RANKS, _REDUCED_NUMEL), np.float32)
    exact = inputs.mean(axis=0)
    scatter_lane, gather_lane = ThreadHub(_RANKS), ThreadHub(_RANKS)
    specs = PhaseSpecs(Uniform(4), Uniform(4))
    layout = cut([Segment("weight", (_REDUCED_NUMEL,), "fp32", specs)], _RANKS, piece_nbytes=_PIECE_NBYTES)

    def reduce(rank: int) -> None:
        reduction = Reduction(
            label="conformance run", x=inputs[rank], layout=layout, keys=_keys(), op=Op.AVG,
            scatter_lane=scatter_lane.transport(rank), gather_lane=gather_lane.transport(rank),
            pool=BufferPool(), tag=0,
        )  # fmt: skip
        for stages in stages_of(ScatterReduce().all_reduce, layout, reduction):
            for work in stages:
                work.wait()

    with ThreadPoolExecutor(_RANKS) as ranks:
        for done in [ranks.submit(reduce, rank) for rank in range(_RANKS)]:
            done.result()
    if inputs[0].tobytes() != inputs[1].tobytes():
        raise ConformanceError("two ranks ended a reduction with different bits")
    error = float(np.square(inputs[0] - exact).sum() / np.square(exact).sum())
    if not error <= _LARGEST_ERROR:
        raise ConformanceError(f"a reduced mean is off by {error:.3g} of its energy")
    return error
