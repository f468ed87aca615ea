"""For loops that reduce gradients by hand: compressed collectives on tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from cgx.collectives.base import Op
from cgx.core.algorithm import Algorithm
from cgx.core.plan import Parameter, to_specs
from cgx.core.spec import PhaseSpecs, Spec
from cgx.errors import SpecError
from cgx.torch.chooser import UNNAMED, Chooser
from cgx.torch.compat import DTYPES
from cgx.torch.method import GIVEN, Method, check_algorithm
from cgx.torch.session import Session
from cgx.torch.tensors import check_tensor

_sessions: dict[int, tuple[dist.ProcessGroup, Session]] = {}
_choosers: dict[int, Chooser] = {}
_OPS = {dist.ReduceOp.SUM: Op.SUM, dist.ReduceOp.AVG: Op.AVG}


def all_reduce(
    tensors: torch.Tensor | Mapping[str, torch.Tensor],
    spec: str | Spec | PhaseSpecs = "uniform:4",
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    algorithm: Algorithm = "scatter_reduce",
) -> None:
    """Sums or averages tensors over the group in place, compressed; all ranks end bit-identical.

    Args:
        tensors: A tensor, or tensors by name (dense, on the CPU, any shape, floating or complex). Every tensor given is
            compressed, small ones too; dtypes other than fp32, fp16 and bf16 are summed exactly.
        spec: Spec of both phases, or ``A+B``; or ``"auto"``: tries exact, 8 and 4 bits by several algorithms in the
            first calls of about this size and keeps the fastest.
        op: SUM or AVG.
        group: Default: the default group. With one rank tensors stay as they are.
        algorithm: As for ``cgx.compress``; of no account when ``spec`` is ``"auto"``.

    Raises:
        SpecError: Invalid spec, op, device, dtype or memory layout, or this rank is not in the group.
        PlanMismatchError: Ranks gave different names, shapes, dtypes or specs.
        TransportError: A peer is lost or silent.

    Cost:
        By default two steps and ``2 (W - 1) / W`` of one compressed copy per rank. The first call with new names,
        shapes or spec also opens two connections per peer and compares the plan; the first with ``"auto"`` measures
        the link for a second.
    """
    kind = _OPS.get(op)
    if kind is None:
        raise SpecError(f"cgx reduces with SUM and AVG, found {op}; use torch.distributed for the others")
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise SpecError("torch.distributed is not initialised; call init_process_group first")
    if not isinstance(group, dist.ProcessGroup):  # new_group gives ranks outside of it a number
        raise SpecError("this rank is not in the group it was asked to reduce over; call on its members only")
    known = _choosers.get(id(group)) if spec == "auto" else None
    if known is not None and type(tensors) is torch.Tensor and known.reduce_natively(tensors, kind):
        return
    named = tensors if isinstance(tensors, Mapping) else {UNNAMED: tensors}
    for name, tensor in named.items():
        check_tensor(name, tensor)
    check_algorithm(algorithm)
    if group.size() == 1 or not named:
        return
    if isinstance(spec, str) and spec == "auto":
        chooser_of(group).reduce(named, kind)
    else:
        reduce_by(_session(group), named, to_specs(spec), kind, algorithm=algorithm)


def reduce_by(
    session: Session,
    named: Mapping[str, torch.Tensor],
    specs: PhaseSpecs,
    op: Op,
    *,
    algorithm: Algorithm,
) -> None:
    """Reduces tensors with specs that are new to the session or not."""
    parameters = {name: _parameter(name, tensor, specs) for name, tensor in named.items()}
    if any(parameter.name not in session.shapes for parameter in parameters.values()):
        session.register(list(parameters.values()), {GIVEN: {p.name: specs for p in parameters.values()}})
    identified = {parameters[name].name: tensor for name, tensor in named.items()}
    session.reduce(identified, op, label=f"cgx.all_reduce, call {session.reductions}", method=Method(GIVEN, algorithm))


def _parameter(name: str, tensor: torch.Tensor, specs: PhaseSpecs) -> Parameter:
    """A tensor under a name that differs for every shape, dtype and spec it is reduced with."""
    shape, dtype = tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype))
    return Parameter(f"{name} {list(shape)} {dtype} {specs}", shape, dtype)


def _session(group: dist.ProcessGroup) -> Session:
    """The group's session; it lives as long as the process, as its connections do."""
    # The group itself is kept: its id could be given to another group otherwise.
    known = _sessions.get(id(group))
    if known is None:
        known = _sessions[id(group)] = (group, Session(group, [], {GIVEN: {}}))
    return known[1]


def chooser_of(group: dist.ProcessGroup) -> Chooser:
    """What ``auto`` knows about a group; made, and the link measured, at first use (collective)."""
    known = _choosers.get(id(group))
    if known is None:
        session = _session(group)

        def reduce(named: Mapping[str, torch.Tensor], op: Op, spec: str, algorithm: Algorithm) -> None:
            reduce_by(session, named, to_specs(spec), op, algorithm=algorithm)

        known = _choosers[id(group)] = Chooser(session, group, reduce)
    return known
