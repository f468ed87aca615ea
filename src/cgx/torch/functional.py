"""For loops that reduce gradients by hand: compressed collectives on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from cgx.collectives.base import Op
from cgx.core.plan import Parameter, to_specs
from cgx.core.spec import PhaseSpecs, Spec
from cgx.errors import SpecError
from cgx.torch.compat import DTYPES
from cgx.torch.session import Session, check_tensor

_sessions: dict[int, tuple[dist.ProcessGroup, Session]] = {}


def all_reduce(
    tensors: torch.Tensor | Mapping[str, torch.Tensor],
    spec: str | Spec | PhaseSpecs = "uniform:4",
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Sums or averages tensors over the group in place, compressed; all ranks end bit-identical.

    Args:
        tensors: A tensor, or tensors by name (dense, on the CPU, any shape, floating or complex). Every tensor given is
            compressed, small ones too; dtypes other than fp32, fp16 and bf16 are summed exactly.
        spec: Spec of both phases, or ``A+B``.
        op: SUM or AVG.
        group: Default: the default group. With one rank tensors stay as they are.

    Raises:
        SpecError: Invalid spec, op, device, dtype or memory layout, or this rank is not in the group.
        PlanMismatchError: Ranks gave different names, shapes, dtypes or specs.
        TransportError: A peer is lost or silent.

    Cost:
        Two steps, ``2 (W - 1) / W`` of one compressed copy per rank. The first call with new names, shapes or spec also
        opens two connections per peer and compares the plan.
    """
    kind, specs = _op(op), to_specs(spec)
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise SpecError("torch.distributed is not initialised; call init_process_group first")
    if not isinstance(group, dist.ProcessGroup):  # new_group gives ranks outside of it a number
        raise SpecError("this rank is not in the group it was asked to reduce over; call on its members only")
    named = tensors if isinstance(tensors, Mapping) else {"tensor": tensors}
    for name, tensor in named.items():
        check_tensor(name, tensor)
    if group.size() == 1 or not named:
        return
    session = _session(group)
    parameters = {name: _parameter(name, tensor, specs) for name, tensor in named.items()}
    if any(parameter.name not in session.specs for parameter in parameters.values()):
        session.register(list(parameters.values()), {p.name: specs for p in parameters.values()})
    identified = {parameters[name].name: tensor for name, tensor in named.items()}
    session.reduce(identified, kind, label=f"cgx.all_reduce, call {session.reductions}")


def _op(op: Any) -> Op:
    ops = {dist.ReduceOp.SUM: Op.SUM, dist.ReduceOp.AVG: Op.AVG}
    for known, kind in ops.items():
        if op == known:
            return kind
    raise SpecError(f"cgx reduces with SUM and AVG, found {op}; use torch.distributed for the others")


def _parameter(name: str, tensor: torch.Tensor, specs: PhaseSpecs) -> Parameter:
    """A tensor under a name that differs for every shape, dtype and spec it is reduced with."""
    shape, dtype = tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype))
    return Parameter(f"{name} {list(shape)} {dtype} {specs}", shape, dtype)


def _session(group: dist.ProcessGroup) -> Session:
    """The group's session; it lives as long as the process, as its connections do."""
    # The group itself is kept: its id could be given to another group otherwise.
    known = _sessions.get(id(group))
    if known is None:
        known = _sessions[id(group)] = (group, Session(group, [], {}))
    return known[1]
