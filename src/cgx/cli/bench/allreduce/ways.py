"""The ways to all-reduce that take turns: Gloo's own, cgx as told, and cgx as it chooses."""

from __future__ import annotations

from typing import Protocol, final

import torch
import torch.distributed as dist

import cgx
from cgx.cli.bench.allreduce.messages import AUTO, BASELINES, FP16, Assignment, Candidate
from cgx.collectives.base import Op
from cgx.core.algorithm import Algorithm
from cgx.core.plan import Parameter
from cgx.core.spec import EXACT, PhaseSpecs, parse_specs
from cgx.torch.functional import chooser_of
from cgx.torch.method import GIVEN
from cgx.torch.session import Session

GRADIENT = "gradient"  # the parameter's name: it decides who owns which elements
_LABEL = "cgx bench allreduce"


class Way(Protocol):
    """One way to reduce a fp32 tensor over all ranks, in place.

    Attributes:
        is_mean: Whether it leaves the mean; else it leaves the sum.
    """

    is_mean: bool

    def reduce(self, x: torch.Tensor) -> None:
        """Reduces; collective."""
        ...

    def payload_nbytes(self) -> int | None:
        """Payload bytes that this rank has sent so far; None where nobody counts them."""
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...


@final
class Gloo:
    """Stock Gloo's sum in fp32 or fp16, casts included; where the link is modelled, the same behind the model."""

    is_mean = False  # dividing is no part of Gloo's all-reduce

    def __init__(self, name: str, numel: int, throttle_bit_s: float | None) -> None:
        self._name, self._is_half = name, name == FP16
        self._session = None if throttle_bit_s is None else _open(name, numel, name, EXACT, throttle_bit_s)

    def reduce(self, x: torch.Tensor) -> None:
        """See `Way.reduce`."""
        y = x.to(torch.float16) if self._is_half else x
        if self._session is None:
            dist.all_reduce(y)
        else:
            self._session.reduce({self._name: y}, Op.SUM, label=f"{self._name} all-reduce")
        if self._is_half:
            x.copy_(y)

    def payload_nbytes(self) -> int | None:
        """See `Way.payload_nbytes`."""
        return None

    def close(self) -> None:
        """See `Way.close`."""
        if self._session is not None:
            self._session.close()


@final
class ByHand:
    """cgx with the spec and the algorithm that it is told."""

    is_mean = True

    def __init__(self, specs: PhaseSpecs, algorithm: Algorithm, numel: int, throttle_bit_s: float | None) -> None:
        self._session = _open(GRADIENT, numel, "fp32", specs, throttle_bit_s, algorithm)

    def reduce(self, x: torch.Tensor) -> None:
        """See `Way.reduce`."""
        self._session.reduce({GRADIENT: x}, Op.AVG, label=_LABEL)

    def payload_nbytes(self) -> int | None:
        """See `Way.payload_nbytes`."""
        return self._session.report().wire_nbytes

    def close(self) -> None:
        """See `Way.close`."""
        self._session.close()


@final
class Auto:
    """cgx as it chooses, through the function that users call."""

    is_mean = False  # a sum, so that choosing Gloo's own path costs what Gloo costs

    def reduce(self, x: torch.Tensor) -> None:
        """See `Way.reduce`."""
        cgx.all_reduce(x, AUTO)

    def payload_nbytes(self) -> int | None:
        """See `Way.payload_nbytes`."""
        return None

    def close(self) -> None:
        """See `Way.close`; the function keeps its connections as long as the process lives."""

    def choice(self, raw_nbytes: int) -> str:
        """What it takes for gradients of this size, in its own words."""
        assert dist.group.WORLD is not None
        return chooser_of(dist.group.WORLD).choice(raw_nbytes)

    def has_settled(self, raw_nbytes: int) -> bool:
        """Whether it is past trying; the same on all ranks."""
        return not self.choice(raw_nbytes).endswith("on trial")


def open_ways(assignment: Assignment, numel: int) -> dict[str, Way]:
    """All contenders of one size by name, the baselines first; collective."""
    throttle_bit_s = assignment.throttle_bit_s
    ways: dict[str, Way] = {name: Gloo(name, numel, throttle_bit_s) for name in BASELINES}
    for candidate in assignment.candidates:
        ways[candidate.name] = _open_candidate(candidate, numel, throttle_bit_s)
    return ways


def _open_candidate(candidate: Candidate, numel: int, throttle_bit_s: float | None) -> Way:
    if candidate.how == AUTO:
        return Auto()
    algorithm: Algorithm = candidate.algorithm  # type: ignore[assignment]  # checked where options are read
    return ByHand(parse_specs(candidate.how), algorithm, numel, throttle_bit_s)


def _open(
    name: str,
    numel: int,
    dtype: str,
    specs: PhaseSpecs,
    throttle_bit_s: float | None,
    algorithm: Algorithm = "scatter_reduce",
) -> Session:
    assert dist.group.WORLD is not None
    return Session(
        dist.group.WORLD,
        [Parameter(name, (numel,), dtype)],
        {GIVEN: {name: specs}},
        algorithm=algorithm,
        throttle_bit_s=throttle_bit_s,
    )
