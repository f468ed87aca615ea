"""The report of a session: what was reduced, what it took on the wire, and what the plan is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from cgx.core.spec import PhaseSpecs


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
    """

    world_size: int
    reductions: int
    raw_nbytes: int
    exact_wire_nbytes: int
    wire_nbytes: int
    wait_seconds: float
    plan: Mapping[str, int]
    modelled_bit_s: float | None

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes an exact all-reduce would have sent over bytes sent; larger is better."""
        return self.exact_wire_nbytes / self.wire_nbytes if self.wire_nbytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the ratio included."""
        return {**asdict(self), "ratio": self.ratio}

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
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def count_specs(specs: Mapping[str, PhaseSpecs]) -> dict[str, int]:
    """Number of parameters by spec text, most frequent first."""
    return dict(Counter(str(s) for s in specs.values()).most_common())
