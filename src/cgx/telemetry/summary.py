"""The report of a session: what was reduced, what it took on the wire, and what the plan is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from cgx.core.plan import to_specs
from cgx.core.spec import Cast, PhaseSpecs, Uniform


@final
@dataclass(frozen=True, slots=True)
class Auto:
    """What ``auto`` chose and why.

    Args:
        choice: What is in use: ``off`` or a spec.
        is_settled: False while candidates are on trial.
        link: What was measured of the link.
        expected_seconds: By candidate: link and codec time of a step's gradients if nothing overlapped.
        step_seconds: By candidate that was tried: median time of a step.
        expected_wait_seconds: By candidate that was tried: what of a step was predicted to be waiting for gradients.
        wait_seconds: By candidate that was tried: what of a step was.
        history: Every decision in a line, with its numbers.
    """

    choice: str
    is_settled: bool
    link: str
    expected_seconds: Mapping[str, float]
    step_seconds: Mapping[str, float]
    expected_wait_seconds: Mapping[str, float]
    wait_seconds: Mapping[str, float]
    history: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """For a table: the candidates with their numbers, then the decisions."""
        rows = [("auto", self.choice if self.is_settled else f"{self.choice}, on trial"), ("link", self.link)]
        for name, expected in self.expected_seconds.items():
            text = f"{_ms(expected)} on link and codec expected"
            if name in self.step_seconds:
                text += f"; a step took {_ms(self.step_seconds[name])}"
            if name in self.wait_seconds:
                text += f", {_ms(self.wait_seconds[name])} of it waiting"
            if name in self.expected_wait_seconds:
                text += f" ({_ms(self.expected_wait_seconds[name])} expected)"
            rows.append((f"  {name}", text))
        return rows + [("", line) for line in self.history]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Totals of one rank since the session began.

    Args:
        world_size: Ranks.
        reductions: Flat buffers reduced (buckets, for DDP).
        raw_nbytes: Gradient bytes reduced, in their own dtype.
        exact_wire_nbytes: What a ring all-reduce of the same bytes would have sent.
        wire_nbytes: Payload bytes this rank sent, in all phases.
        wait_seconds: Time callers spent waiting for results after they had nothing else to do.
        plan: Number of parameters by spec.
        modelled_bit_s: Rate of the modelled link, or None on the real one.
        auto: What ``auto`` chose and why; None when a person chose.
    """

    world_size: int
    reductions: int
    raw_nbytes: int
    exact_wire_nbytes: int
    wire_nbytes: int
    wait_seconds: float
    plan: Mapping[str, int]
    modelled_bit_s: float | None
    auto: Auto | None = None

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes an exact all-reduce would have sent over bytes sent; larger is better."""
        return self.exact_wire_nbytes / self.wire_nbytes if self.wire_nbytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the ratio included."""
        return {**asdict(self), "ratio": self.ratio}

    def scalars(self) -> dict[str, float]:
        """Numbers by name, for a logger's ``log(report.scalars(), step)``; ``docs/visibility.md`` has the recipes.

        All are totals since the session began except ``cgx/ratio`` and, under ``auto``, ``cgx/is_settled`` (0 or 1) and
        ``cgx/bits``: bits per code of what is in use, 16 for bf16, 32 when gradients travel exact.

        Example:
            >>> Report(2, 1, 4096, 4096, 512, 0.5, {}, None).scalars()["cgx/ratio"]
            8.0
        """
        scalars: dict[str, float] = {
            "cgx/reductions": self.reductions,
            "cgx/raw_nbytes": self.raw_nbytes,
            "cgx/exact_wire_nbytes": self.exact_wire_nbytes,
            "cgx/wire_nbytes": self.wire_nbytes,
            "cgx/ratio": self.ratio,
            "cgx/wait_seconds": self.wait_seconds,
        }
        if self.auto is not None:
            scalars |= {"cgx/is_settled": self.auto.is_settled, "cgx/bits": _bits_of(self.auto.choice)}
        return {name: float(value) for name, value in scalars.items()}

    def __str__(self) -> str:
        link = "real link" if self.modelled_bit_s is None else f"modelled {self.modelled_bit_s / 1e6:g} Mbit/s"
        rows = [
            ("ranks", f"{self.world_size} ({link})"),
            ("reductions", f"{self.reductions:,}"),
            ("gradient bytes", f"{self.raw_nbytes:,}"),
            ("sent by this rank", f"{self.wire_nbytes:,} bytes"),
            ("ratio to exact", f"{self.ratio:.2f}x fewer bytes"),
            ("waited", f"{self.wait_seconds:.2f} s"),
            *((f"{count} parameters", spec) for spec, count in self.plan.items()),
            *(() if self.auto is None else self.auto.rows()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _bits_of(choice: str) -> int:
    match to_specs(choice).scatter:
        case Uniform(bits=bits):
            return bits
        case Cast():
            return 16
        case _:
            return 32


def count_specs(specs: Mapping[str, PhaseSpecs]) -> dict[str, int]:
    """Number of parameters by spec text, most frequent first."""
    return dict(Counter(str(s) for s in specs.values()).most_common())
