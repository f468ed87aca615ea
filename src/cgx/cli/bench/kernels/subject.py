"""One spec in one dtype on trial: its buffers, the operations that are timed, and whether they came out right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.cli.bench.fidelity import runs, scales
from cgx.collectives.layout import Group, cut
from cgx.compressors.base import OWN, Store
from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, stream
from cgx.core.segments import CARRIERS, Segment
from cgx.core.spec import EXACT, ITEMSIZE, Dtype, PhaseSpecs, Uniform
from cgx.kernels.reference import from_f32, to_f32

PAYLOADS = (1, 3)  # of peers: worlds of two and four ranks
_NAME = "gradient"
_OWN_RANK = 0
# Rounding of a decoded value to the gradient's dtype: half a unit, relative and near zero.
_ROUNDING: dict[Dtype, tuple[float, float]] = {
    "fp32": (0.0, 2.0**-149),
    "fp16": (2.0**-11, 2.0**-25),
    "bf16": (2.0**-8, 2.0**-133),
}


@final
@dataclass(frozen=True)
class Operation:
    """Something to time.

    Attributes:
        name: `encode`, `decode`, `decode_add`, `reduce_N` (fused, N payloads), or a baseline's name.
        run: What is timed.
        prepare: What has to happen before, outside the clock.
        baseline: The operation it is compared with; None for a baseline.
        is_right: Whether the last `run` did what it should.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    baseline: str | None = None
    is_right: Callable[[], bool] = lambda: True


@final
class Subject:
    """A spec, a dtype and the buffers for both.

    The table has the rows that a session makes of one tensor, all in one call; buffers are larger than the caches.

    Args:
        spec: Spec of both phases.
        dtype: Dtype of the gradient.
        nbytes: Raw bytes of the gradient.

    Cost: four to six times ``nbytes`` of memory.
    """

    def __init__(self, spec: Uniform, dtype: Dtype, nbytes: int) -> None:
        self.spec, self.dtype = spec, dtype
        self.numel = nbytes // ITEMSIZE[dtype]
        self.raw_nbytes = self.numel * ITEMSIZE[dtype]
        group = self._only_group(PhaseSpecs(spec, spec))
        self._codec, self._table = group.scatter, group.table
        self._keys = parameter_keys(0, np.array([name_hash(_NAME)], np.uint64), np.zeros(1, np.uint64))
        wire_nbytes = self._table.wire_nbytes
        self._x = self._gradient(_OWN_RANK)
        self._out, self._own = np.zeros_like(self._x), np.zeros_like(self._x)
        self._wire, self._wire_out = (np.zeros(wire_nbytes, np.uint8) for _ in range(2))
        self._identity = self._only_group(EXACT)
        self._total = np.zeros(0 if dtype == "fp32" else self.numel, np.float32)
        # Payload r starts at r * wire_nbytes; the own rank has none.
        self._wires = np.zeros((1 + max(PAYLOADS)) * wire_nbytes, np.uint8)
        for rank in range(1, 1 + max(PAYLOADS)):
            self._compress(self._gradient(rank), self._payload(rank), stream(SCATTER, rank))

    @property
    def bits_per_element(self) -> float:
        """Of one payload, without its head."""
        return 8 * self._table.wire_nbytes / self.numel

    def operations(self) -> list[Operation]:
        """Everything to time in a round, baselines included."""
        timed = [
            Operation("memcpy", lambda: np.copyto(self._out, self._x)),
            Operation("encode", self._encode, baseline="memcpy", is_right=self._encoded),
            Operation("decode", self._decode, self._encode, baseline="memcpy", is_right=self._decoded),
            Operation(
                "decode_add",
                lambda: self._decompress(self._wire, self._out, _sent(), Store.ADD),
                lambda: np.copyto(self._out, self._x),
                baseline="memcpy",
                is_right=self._added,
            ),
        ]
        for payloads in PAYLOADS:
            steps = Operation(
                f"steps_{payloads}",
                partial(self._reduce_by_steps, self._own, self._wire_out, payloads),
                self._restore,
            )
            fused = Operation(
                f"reduce_{payloads}",
                partial(self._reduce, payloads),
                self._restore,
                baseline=steps.name,
                is_right=partial(self._equals_steps, payloads),
            )
            timed += [fused, steps]
        return timed

    def _only_group(self, specs: PhaseSpecs) -> Group:
        segment = Segment(_NAME, (self.numel,), self.dtype, specs)
        layout = cut([segment], 1, piece_nbytes=max(1, self.raw_nbytes))
        return layout.pieces[0].chunks[0].groups[0]

    def _gradient(self, rank: int) -> NDArray[Any]:
        normal = np.random.default_rng(rank).standard_normal(self.numel, np.float32)
        return from_f32(normal, CARRIERS[self.dtype])

    def _payload(self, rank: int) -> NDArray[np.uint8]:
        nbytes = self._table.wire_nbytes
        return self._wires[rank * nbytes : (rank + 1) * nbytes]

    def _compress(self, x: NDArray[Any], wire: NDArray[np.uint8], sent: int) -> None:
        self._codec.compress(x, wire, self._table, self._keys, sent)

    def _decompress(self, wire: NDArray[np.uint8], out: NDArray[Any], sent: int, store: Store = Store.REPLACE) -> None:
        self._codec.decompress(wire, out, self._table, self._keys, sent, store=store)

    def _encode(self) -> None:
        self._compress(self._x, self._wire, _sent())

    def _decode(self) -> None:
        self._decompress(self._wire, self._out, _sent())

    def _restore(self) -> None:
        np.copyto(self._own, self._x)

    def _reduce(self, payloads: int) -> None:
        starts = np.arange(1 + payloads, dtype=np.int64) * self._table.wire_nbytes
        self._codec.reduce(
            self._wires, starts, self._own, self._wire_out, self._table, self._table, self._keys,
            into=self._codec, senders=[OWN, *(stream(SCATTER, rank) for rank in range(1, 1 + payloads))],
            stream_out=stream(GATHER, _OWN_RANK), scale=1 / (1 + payloads),
        )  # fmt: skip

    def _reduce_by_steps(self, own: NDArray[Any], wire_out: NDArray[np.uint8], payloads: int) -> None:
        """The same reduction by three passes: add every payload, scale, encode and decode what was encoded."""
        total = own if self.dtype == "fp32" else self._widen(own)
        for rank in range(1, 1 + payloads):
            self._decompress(self._payload(rank), total, stream(SCATTER, rank), Store.ADD)
        np.multiply(total, np.float32(1 / (1 + payloads)), out=total)
        self._compress(total, wire_out, stream(GATHER, _OWN_RANK))
        self._decompress(wire_out, own, stream(GATHER, _OWN_RANK))

    def _widen(self, own: NDArray[Any]) -> NDArray[np.float32]:
        """Sums of 16-bit gradients run in fp32: a copy, made by the fastest kernel there is."""
        self._identity.scatter.decompress(own.view(np.uint8), self._total, self._identity.table, self._keys, 0)
        return self._total

    def _encoded(self) -> bool:
        self._decode()
        return self._decoded()

    def _decoded(self) -> bool:
        """Whether what was decoded is within the declared bound of the gradient, element by element."""
        bound = self._codec.guarantees.error_bound
        relative, least = _ROUNDING[self.dtype]
        top = 2.0**self.spec.bits
        for run in runs(self.numel):
            x, out = to_f32(self._x[run]), to_f32(self._out[run])
            low, step = (np.repeat(a, self.spec.block_size)[: len(x)].astype(np.float64) for a in scales(self.spec, x))
            # Codes are cut to 16 fractional bits and made in fp32, values are a product and a sum in fp32.
            reach = np.abs(low) + top * step
            precision = step * (2.0**-16 + 3 * top * 2.0**-24) + reach * 2.0**-23
            allowed = bound * step + precision + np.abs(out) * relative + least
            if not np.all(np.abs(out.astype(np.float64) - x) <= allowed):
                return False
        return True

    def _added(self) -> bool:
        found = self._out.copy()
        decoded = np.empty(self.numel, np.float32)
        self._decompress(self._wire, decoded, _sent())
        return found.tobytes() == from_f32(to_f32(self._x) + decoded, found.dtype).tobytes()

    def _equals_steps(self, payloads: int) -> bool:
        own, wire_out = self._x.copy(), np.zeros_like(self._wire_out)
        self._reduce_by_steps(own, wire_out, payloads)
        return bool(np.array_equal(wire_out, self._wire_out)) and own.tobytes() == self._own.tobytes()


def _sent() -> int:
    return stream(SCATTER, _OWN_RANK)
