"""A session: private lanes, one pipeline and the per-parameter state behind every door."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cgx.collectives.agreement import agree
from cgx.collectives.base import BufferPool, Op, Reducer, Reduction, Stages, stages_of
from cgx.collectives.exact import exact_all_reduce
from cgx.collectives.layout import Layout
from cgx.collectives.nodes import find_nodes, host_identity
from cgx.collectives.pipeline import Job, Pipeline
from cgx.collectives.registry import cut_for, reducer_for
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.core.algorithm import Algorithm
from cgx.core.env import local_world_size
from cgx.core.plan import Parameter, fingerprint, make_plan
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import Segment
from cgx.core.spec import EXACT, ITEMSIZE, Dtype, Identity, PhaseSpecs, Spec
from cgx.errors import CgxError
from cgx.telemetry.summary import Report
from cgx.torch.compat import DTYPES, new_lane, timeout_of, to_array
from cgx.torch.method import Method, Plans, check_options
from cgx.torch.spans import span, spanned
from cgx.torch.tensors import check_tensor
from cgx.transports.base import Transport
from cgx.transports.process_group import ProcessGroupTransport, transport_error
from cgx.transports.throttled import ModelledLink, ThrottledTransport

_GRACE_SECONDS = 5.0
_UNHURRIED_NBYTES = 16 << 20  # raw bytes of a piece that nobody waits for (measured: docs/adr/0007)
_INTRA = Identity()


@final
class Pending:
    """A reduction under way."""

    def __init__(self, tensor: torch.Tensor, on_done: Callable[[], None] | None) -> None:
        self.tensor = tensor
        self.error: BaseException | None = None
        self._on_done = on_done
        self._finished = threading.Event()

    def finish(self, error: BaseException | None) -> None:
        """Called by the pipeline, once."""
        self.error = error
        self._finished.set()
        if self._on_done is not None:
            self._on_done()

    def wait(self) -> None:
        """Blocks until the result is in the tensor; raises what the pipeline raised."""
        self._finished.wait()
        if self.error is not None:
            raise self.error


@final
class Session:
    """Reduces tensors of one group of ranks, over connections of its own.

    Making a session is collective: it opens two lanes and compares the plan.

    Args:
        group: The ranks; the session issues nothing on it.
        parameters: Everything it may be asked to reduce, in an order equal on all ranks.
        plans: Specs by parameter name, by the plan's name; the first plan is used where none is asked for.
        algorithm: Used where none is asked for.
        intra: Spec of the hierarchical algorithm inside a node.
        seed: Seed of random bits.
        has_error_feedback: Keep what phase one loses and add it next time (one fp32 copy of the compressed
            parameters).
        throttle_bit_s: Rate of a modelled link, or None.
        piece_nbytes: Raw bytes of a piece; None chooses by the size of the buffer.

    Raises:
        SpecError: An option is out of its range, or the ranks have no hierarchy that was asked for.
        PlanMismatchError: Ranks differ in anything that decides bytes.
        TransportError: A rank does not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[Parameter],
        plans: Plans,
        *,
        algorithm: Algorithm = "scatter_reduce",
        intra: Spec = _INTRA,
        seed: int = 0,
        has_error_feedback: bool = False,
        throttle_bit_s: float | None = None,
        piece_nbytes: int | None = None,
    ) -> None:
        check_options(algorithm, has_error_feedback=has_error_feedback, piece_nbytes=piece_nbytes)
        link = None if throttle_bit_s is None else ModelledLink(throttle_bit_s)
        self.timeout_seconds = timeout_of(group).total_seconds()
        self.scatter_lane, self.gather_lane = (self._open_lane(group, link) for _ in range(2))
        self._open_lanes: tuple[Transport, ...] = (self.scatter_lane, self.gather_lane)
        self.seed, self.throttle_bit_s = seed, throttle_bit_s
        self._piece_nbytes, self._intra = piece_nbytes, intra
        self.method = Method(next(iter(plans)), algorithm)
        self._settings = {
            "world size": self.world_size,
            "algorithm": algorithm,
            "intra-node spec": intra,
            "lanes": 2,
            "piece bytes": piece_nbytes or "by size",
            "seed": seed,
            "error feedback": has_error_feedback,
            "modelled link": throttle_bit_s or "none",
        }
        self._foreign: set[str] = set()
        self.plans: dict[str, dict[str, PhaseSpecs]] = {name: {} for name in plans}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._index: dict[str, int] = {}
        self._hashes = self.reduction_index = np.zeros(0, np.uint64)
        self._pool = BufferPool()
        self._pipeline = Pipeline(f"cgx-session-{id(self):x}", on_failure=self._close_lanes)
        try:
            self.register(parameters, plans)
            local = local_world_size() if self.world_size == dist.get_world_size() else None
            self.nodes = find_nodes(self.scatter_lane, host_identity(), local)
            if algorithm == "hierarchical":
                self._reducer(algorithm)
        except CgxError:
            self._close_lanes()
            raise
        # Decided for the whole plan: if it depended on who shares a bucket, so would the order of sums.
        self._off = {n for n, specs in self.plans.items() if specs and all(s == EXACT for s in specs.values())}
        self.state_offsets: dict[str, int] = {}
        self.residual = self._make_residual(parameters) if has_error_feedback else None
        self._layouts: dict[tuple[object, ...], tuple[Layout, NDArray[np.int64], int]] = {}
        self.reductions = self._raw_nbytes = self._native_nbytes = self._uncounted_nbytes = 0
        self.wait_seconds = 0.0

    def register(self, parameters: Sequence[Parameter], plans: Plans) -> None:
        """Adds parameters, and plans for them, that may be asked for; collective, while no reduction is under way.

        Raises:
            PlanMismatchError: Ranks differ in anything that decides bytes; nothing is added.
            TransportError: A peer is gone or silent, or the session is broken.
        """
        self.check()
        # What no kernel reads travels exact, and the plan says so.
        foreign = {parameter.name for parameter in parameters if parameter.dtype not in ITEMSIZE}
        exact = dict.fromkeys(foreign, EXACT)
        made = {name: make_plan({**specs, **exact}, parameters, self._settings) for name, specs in plans.items()}
        lines = tuple(line for name, plan in made.items() for line in (f"plan: {name}", *plan.lines))
        agree(lines, self.scatter_lane, about="the plan")
        self._lines = lines
        new = [parameter for parameter in parameters if parameter.name not in self._index]
        self._foreign |= foreign
        for name, plan in made.items():
            self.plans.setdefault(name, {}).update(plan.specs)
        self.shapes.update({parameter.name: parameter.shape for parameter in new})
        self._index.update({parameter.name: len(self._index) + i for i, parameter in enumerate(new)})
        hashes = np.array([name_hash(parameter.name) for parameter in new], np.uint64)
        self._hashes = np.concatenate([self._hashes, hashes])
        self.reduction_index = np.concatenate([self.reduction_index, np.zeros(len(new), np.uint64)])

    def _reducer(self, algorithm: Algorithm) -> Reducer:
        return reducer_for(algorithm, nodes=self.nodes)

    def _open_lane(self, group: dist.ProcessGroup, link: ModelledLink | None) -> Transport:
        try:
            lane = ProcessGroupTransport(new_lane(group), timeout_seconds=self.timeout_seconds)
        except RuntimeError as error:
            raise transport_error(error, "connecting the ranks of a new session", self.timeout_seconds) from error
        return lane if link is None else ThrottledTransport(lane, link)

    def _make_residual(self, parameters: Sequence[Parameter]) -> NDArray[np.float32]:
        at = 0
        for parameter in parameters:
            if any(specs[parameter.name] != EXACT for specs in self.plans.values()):
                self.state_offsets[parameter.name] = at
                at += int(np.prod(parameter.shape))
        return np.zeros(at, np.float32)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.scatter_lane.world_size

    def reduce_flat(
        self,
        flat: torch.Tensor,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        op: Op,
        *,
        label: str,
        method: Method | None = None,
        owners: Sequence[int] | None = None,
        is_awaited: bool = True,
        on_done: Callable[[], None] | None = None,
    ) -> Pending:
        """Queues the in-place reduction of a flat tensor that concatenates whole parameters.

        Args:
            flat: Contiguous CPU tensor, or any tensor the engine can sum for the exact path.
            names: Parameters in buffer order.
            shapes: Their shapes.
            op: SUM or AVG.
            label: What errors call the reduction.
            method: Equal on all ranks; None is the session's own.
            owners: Rank that reduces each parameter; then only the owner's part is reduced (reduce-scatter).
            is_awaited: False while the caller computes on: larger pieces then leave it more of the processor.
            on_done: Called on the pipeline's thread when the result, or an error, is there.

        Raises:
            SpecError: No such algorithm, or none where these ranks are.
            TransportError: The session is broken.
        """
        pending = Pending(flat, on_done)
        method = self.method if method is None else method
        reducer = self._reducer(method.algorithm)
        self.reductions += 1
        self._raw_nbytes += 0 if flat.is_sparse else flat.nbytes
        if self._is_exact(flat, names, method) and owners is None:
            exact_tag = _hash64("exact", *names, flat.dtype, flat.shape, op, self.reductions)

            def make() -> Sequence[Stages]:
                return [exact_all_reduce(flat, op, self.scatter_lane, exact_tag)]
        else:
            layout, chosen, digest = self._layout(
                names, shapes, DTYPES[flat.dtype], method, owners, is_awaited=is_awaited
            )
            indices = self.reduction_index[chosen]
            keys = parameter_keys(self.seed, self._hashes[chosen], indices)
            self.reduction_index[chosen] += np.uint64(1)
            tag = _hash64(digest, op, indices.tolist())
            reduction = Reduction(
                label=label, x=to_array(flat), layout=layout, keys=keys, op=op,
                scatter_lane=self.scatter_lane, gather_lane=self.gather_lane, pool=self._pool,
                tag=tag, residual=self.residual,
            )  # fmt: skip
            reduce = reducer.all_reduce if owners is None else ScatterReduce().reduce_scatter

            def make() -> Sequence[Stages]:
                return stages_of(reduce, layout, reduction)

        self._pipeline.submit(Job(label, spanned(make), pending.finish))
        return pending

    def _is_exact(self, flat: torch.Tensor, names: Sequence[str], method: Method) -> bool:
        # A complex parameter arrives as a real view: its name tells, not the dtype of the buffer.
        is_foreign = flat.dtype not in DTYPES or not self._foreign.isdisjoint(names)
        return method.plan in self._off or flat.is_sparse or is_foreign

    def _layout(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: Dtype,
        method: Method,
        owners: Sequence[int] | None,
        *,
        is_awaited: bool,
    ) -> tuple[Layout, NDArray[np.int64], int]:
        key = (tuple(names), dtype, method, None if owners is None else tuple(owners), is_awaited)
        if key not in self._layouts:
            specs = self.plans[method.plan]
            segments = [
                Segment(name, shape, dtype, specs[name], None if owners is None else owners[i])
                for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
            ]
            layout = cut_for(
                method.algorithm if owners is None else "scatter_reduce",
                segments,
                self.world_size,
                piece_nbytes=self._piece_nbytes or (None if is_awaited else _UNHURRIED_NBYTES),
                states=[self.state_offsets.get(name) for name in names],
                intra=self._intra,
            )
            digest = _hash64(*self._lines, method, *segments)
            chosen = np.array([self._index[name] for name in names], np.int64)
            self._layouts[key] = layout, chosen, digest
        return self._layouts[key]

    def reduce(self, tensors: Mapping[str, torch.Tensor], op: Op, *, label: str, method: Method | None = None) -> None:
        """Reduces dense tensors in place and waits.

        Tensors of one dtype travel together; a single contiguous tensor is not copied.

        Raises:
            SpecError: A tensor is not dense, not on the CPU or not of a floating or complex dtype.
            TransportError: A peer is lost or silent; the session is then broken.
        """
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
            by_dtype.setdefault(tensor.dtype, []).append(name)
        pendings = []
        for dtype, names in by_dtype.items():
            parts = [tensors[name].detach() for name in names]  # weights are leaves that may not be written otherwise
            whole = len(parts) == 1 and parts[0].is_contiguous()
            flat = parts[0].view(-1) if whole else torch.cat([part.reshape(-1) for part in parts])
            shapes = [tuple(part.shape) for part in parts]
            pending = self.reduce_flat(flat, names, shapes, op, label=f"{label} ({dtype})", method=method)
            pendings.append((pending, parts, whole))
        for pending, parts, whole in pendings:
            self.wait(pending)
            if not whole:
                pieces = torch.split(pending.tensor, [part.numel() for part in parts])
                for part, piece in zip(parts, pieces, strict=True):
                    part.copy_(piece.view(part.shape))

    def count_native(self, flat: torch.Tensor) -> None:
        """Lets the report know of a reduction that the engine does by itself on the user's group."""
        self.reductions += 1
        if not flat.is_sparse:
            self._raw_nbytes += flat.nbytes
            self._native_nbytes += exact_nbytes(flat.nbytes, self.world_size)

    @property
    def _sent_nbytes(self) -> int:
        return self.scatter_lane.sent_nbytes + self.gather_lane.sent_nbytes + self._native_nbytes

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """For what travels on the lanes while they are idle: no part of the report, and a failure breaks the session.

        Otherwise this rank would go on while its peers wait for it, or read its next message as the one that failed.
        """
        self.check()
        sent, counted = self._sent_nbytes, (self.reductions, self._raw_nbytes)
        try:
            yield
        except CgxError as error:
            self._pipeline.fail(error)
            raise
        self._uncounted_nbytes += self._sent_nbytes - sent
        self.reductions, self._raw_nbytes = counted

    def wait(self, pending: Pending) -> None:
        """Waits for a reduction and counts the time."""
        start = time.perf_counter()
        try:
            with span("cgx::wait"):
                pending.wait()
        finally:
            self.wait_seconds += time.perf_counter() - start

    def check(self) -> None:
        """Raises TransportError when the session is broken."""
        self._pipeline.check()

    def report(self) -> Report:
        """Totals of this rank so far; which plan they are of, the door knows."""
        world = self.world_size
        return Report(
            world_size=world,
            reductions=self.reductions,
            raw_nbytes=self._raw_nbytes,
            exact_wire_nbytes=exact_nbytes(self._raw_nbytes, world),
            wire_nbytes=self._sent_nbytes - self._uncounted_nbytes,
            wait_seconds=self.wait_seconds,
            plan={},
            modelled_bit_s=self.throttle_bit_s,
        )

    def close(self) -> None:
        """Finishes queued work and closes the lanes; local, not collective."""
        self._pipeline.close(self.timeout_seconds + _GRACE_SECONDS)
        self._close_lanes()

    def _close_lanes(self) -> None:
        # After a failure this is how peers hear of it at once, rather than by their timeouts.
        lanes, self._open_lanes = self._open_lanes, ()
        for lane in lanes:
            lane.close()


def _hash64(*words: object) -> int:
    return int.from_bytes(fingerprint(str(word) for word in words)[:8], "little")


def exact_nbytes(raw_nbytes: int, world_size: int) -> int:
    """Bytes a rank sends in an uncompressed ring all-reduce."""
    return 2 * (world_size - 1) * raw_nbytes // world_size
