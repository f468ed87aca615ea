"""What a session's link and codecs can do, and which algorithm is predicted to be fastest on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from cgx.collectives.base import Op
from cgx.collectives.layout import default_piece_nbytes
from cgx.collectives.nodes import Nodes
from cgx.collectives.probe import agree_on_slowest, glance, probe
from cgx.compressors.registry import compressor_for
from cgx.core.algorithm import Algorithm
from cgx.core.plan import Parameter, to_specs
from cgx.core.spec import EXACT, PhaseSpecs
from cgx.policies.cost import (
    Measured,
    Work,
    codec_seconds,
    compressed_seconds,
    exact_floor_seconds,
    exact_seconds,
)
from cgx.torch.method import Method
from cgx.torch.session import Session

SPECS = ("uniform:8", "uniform:4")  # the more faithful first
_LITTLE = Parameter("cgx.probe", (1, 2048), "fp32")
_GLANCE_SECONDS = 0.008  # beyond what a token bucket or a switch's buffer lets through at once
_GLANCE_NBYTES = (1 << 16, 1 << 24)
_CHANGED = 1.6  # times slower or faster: more than a busy neighbour or the clock of a processor explains


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What a reduction has to move.

    Args:
        numel: Elements that plans compress.
        exact_nbytes: Bytes of the others: vectors, small tensors, foreign dtypes.
        raw_nbytes: All bytes.
    """

    numel: int
    exact_nbytes: int
    raw_nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """The fastest algorithm for one spec and size, and what it is predicted to take; None is the exact path."""

    method: Method | None
    seconds: float


@final
class Advisor:
    """Measures a session's surroundings and predicts.

    Making one is collective and takes under a second once the kernels are compiled.

    Args:
        session: Idle; it gets a parameter more, to probe with.
        plans: Names of the session's plans that take part, each named by its spec.
    """

    def __init__(self, session: Session, plans: Sequence[str]) -> None:
        self._session = session
        self._specs = {name: to_specs(name) for name in plans}
        self.plans = tuple(plans)
        with session.exchange():
            session.register([_LITTLE], {name: {_LITTLE.name: specs} for name, specs in self._specs.items()})
        nodes = session.nodes
        self._nodes = nodes if isinstance(nodes, Nodes) else None
        self.algorithms: tuple[Algorithm, ...] = ("all_gather", "scatter_reduce")
        if self._nodes is not None:
            self.algorithms += ("hierarchical",)
        self._little = torch.zeros(_LITTLE.shape).view(-1)
        self._advice: dict[tuple[str, Load], Advice] = {}
        self.measured = self.probe()

    def probe(self) -> Measured:
        """Measures everything anew; collective, while the session is idle."""
        self._advice.clear()
        with self._session.exchange():
            self.measured = probe(
                self._session.scatter_lane,
                {name: specs.scatter for name, specs in self._specs.items()},
                nodes=self._nodes,
                reduce_little=self._reduce_little,
                algorithms=self.algorithms,
            )
        return self.measured

    def link_has_changed(self) -> bool:
        """A glance at the link, of about 8 ms; when it is not as it was, everything is measured anew. Collective."""
        before = self.measured.flat
        nbytes = round(min(max(_GLANCE_SECONDS / before.byte_s, _GLANCE_NBYTES[0]), _GLANCE_NBYTES[1]))
        lane = self._session.scatter_lane
        for _ in range(2):  # one hiccup is no change
            with self._session.exchange():
                seconds = glance(lane, nbytes)
            if 1 / _CHANGED < seconds / before.seconds(nbytes) < _CHANGED:
                return False
        return not 1 / _CHANGED < self.probe().flat.byte_s / before.byte_s < _CHANGED

    def exact(self, raw_nbytes: int) -> float:
        """Predicted seconds of the engine's own all-reduce."""
        return exact_seconds(self.measured, raw_nbytes)

    def exact_wait(self, raw_nbytes: int) -> float:
        """Predicted seconds in which an exact all-reduce leaves the processor idle: what compression can win back."""
        return self.exact(raw_nbytes) * (1 - self.measured.exact_busy)

    def exact_floor(self, raw_nbytes: int) -> float:
        """Seconds that the bytes of an exact all-reduce need on the wire, were it as fast as can go unnoticed."""
        return exact_floor_seconds(self.measured, raw_nbytes) / _CHANGED

    def predict(self, plan: str, algorithm: Algorithm, load: Load) -> float:
        """Predicted seconds of a compressed reduction that nothing overlaps with."""
        return compressed_seconds(self.measured, algorithm, plan, _work(self._specs[plan], load))

    def best(self, plan: str, load: Load) -> Advice:
        """The fastest way to reduce a buffer within ``plan``; exact where compression only costs."""
        key = (plan, load)
        if key not in self._advice:
            advice = Advice(None, self.exact(load.raw_nbytes))
            for algorithm in self.algorithms if load.numel else ():
                seconds = self.predict(plan, algorithm, load)
                if seconds < advice.seconds:
                    advice = Advice(Method(plan, algorithm), seconds)
            self._advice[key] = advice
        return self._advice[key]

    def processor_seconds(self, plan: str, load: Load) -> float:
        """Predicted processor time of the codec for a buffer that travels as ``best`` says."""
        method = self.best(plan, load).method
        if method is None:
            return 0.0
        return codec_seconds(self.measured, method.algorithm, plan, _work(self._specs[plan], load))

    def agree(self, seconds: Sequence[float]) -> list[float]:
        """The slowest rank's values, on every rank; collective."""
        with self._session.exchange():
            return agree_on_slowest(seconds, self._session.scatter_lane)

    def _reduce_little(self, algorithm: Algorithm) -> None:
        session = self._session
        method = Method(self.plans[-1], algorithm)
        pending = session.reduce_flat(
            self._little, [_LITTLE.name], [_LITTLE.shape], Op.AVG, label="the probe", method=method
        )
        pending.wait()

    def __str__(self) -> str:
        link = self.measured.flat
        return f"{link.bit_s / 1e9:.3g} Gbit/s, {link.fixed_s * 1e3:.2g} ms"


def _work(specs: PhaseSpecs, load: Load) -> Work:
    copies = [compressor_for(spec).row_nbytes(load.numel, "fp32") for spec in (specs.scatter, specs.gather)]
    pieces = -(-load.raw_nbytes // default_piece_nbytes(load.raw_nbytes))
    return Work(load.numel, load.raw_nbytes, sum(copies) / len(copies) + load.exact_nbytes, max(1, pieces))


def load_of(session: Session, names: Sequence[str], raw_nbytes: int) -> Load:
    """What a buffer of these parameters has to move."""
    specs, shapes = session.plans[SPECS[-1]], session.shapes
    numels = {name: math.prod(shapes[name]) for name in names}
    compressed = sum(numel for name, numel in numels.items() if specs[name] != EXACT)
    return Load(compressed, raw_nbytes - raw_nbytes * compressed // max(1, sum(numels.values())), raw_nbytes)
