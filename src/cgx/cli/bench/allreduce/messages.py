"""What the supervisor tells the ranks, and what each rank tells the supervisor, as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TypeAlias, final

CGX, FP32, FP16 = "cgx", "fp32", "fp16"  # contenders


@final
@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know.

    Attributes:
        spec: Specs of both phases.
        numel: Elements of the fp32 gradient.
        runs: Rounds that count.
        warm_up: Rounds before them.
        interface: Whose counters tell what this rank sent; None where other traffic shares them.
        addresses: Where each rank listens, in rank order.
        goodput_port: First of the ports for raw streams; None where the link is modelled.
        throttle_bit_s: Modelled link rate in bits per second; None where the link is real.
        timeout_seconds: Bound on every wait.
    """

    spec: str
    numel: int
    runs: int
    warm_up: int
    interface: str | None
    addresses: tuple[str, ...]
    goodput_port: int | None
    throttle_bit_s: float | None
    timeout_seconds: float

    @property
    def world_size(self) -> int:
        """Ranks, one on each host."""
        return len(self.addresses)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the gradient."""
        return 4 * self.numel

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "addresses": tuple(fields["addresses"])})


@final
@dataclass(frozen=True)
class Track:
    """One contender on one rank, an entry a round.

    Attributes:
        seconds: Wall-clock time of the call.
        cpu_seconds: Processor time of all threads of the process meanwhile.
        counted_nbytes: What the interface sent meanwhile; empty where it has no counters of its own.
        digests: Hash of the result's bits.
        nmses: Relative squared error of the mean; rank 0 only.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counted_nbytes: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    nmses: list[float] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Advanced:
    """Rank 0 finished a round, of those before the clock starts or of those that count."""

    rounds: int


@final
@dataclass(frozen=True)
class Measured:
    """All that one rank found.

    Attributes:
        rank: Which one.
        tracks: By contender.
        payload_nbytes: Payload bytes that this rank sent in each round of cgx, by the transport's count.
        goodput_seconds: Of each exchange of raw streams; empty where the link is modelled.
        exchanged_nbytes: Bytes of each such exchange, in each direction.
        allowed_nmses: Largest error a correct result can have, by contender; rank 0 only.
    """

    rank: int
    tracks: dict[str, Track]
    payload_nbytes: list[int]
    goodput_seconds: list[float]
    exchanged_nbytes: int
    allowed_nmses: dict[str, float]


Event: TypeAlias = Advanced | Measured
_PREFIX = '{"event": '


def to_line(event: Event) -> str:
    r"""Writes an event as one line of JSON, newline included.

    Example:
        >>> to_line(Advanced(rounds=3))
        '{"event": "Advanced", "rounds": 3}\n'
    """
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Reads what `to_line` wrote; None for a line that is something else, such as a library's.

    Example:
        >>> from_line(to_line(Advanced(rounds=3)))
        Advanced(rounds=3)
        >>> from_line("hello") is None
        True
    """
    if not line.startswith(_PREFIX):
        return None
    fields = json.loads(line)
    if fields.pop("event") == Advanced.__name__:
        return Advanced(**fields)
    tracks = {name: Track(**track) for name, track in fields["tracks"].items()}
    return Measured(**{**fields, "tracks": tracks})
