"""What the supervisor tells the ranks, and what each rank tells the supervisor, as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TypeAlias, final

FP32, FP16 = "fp32", "fp16"  # the baselines, by name
BASELINES = (FP32, FP16)
AUTO = "auto"


@final
@dataclass(frozen=True)
class Candidate:
    """A way to all-reduce that was asked for, to be held against the baselines.

    Attributes:
        how: A spec of both phases, ``A+B``, or ``auto``.
        algorithm: The reducer's name; ``auto`` where cgx chooses.
    """

    how: str
    algorithm: str

    @property
    def name(self) -> str:
        """What tracks and tables call it."""
        return AUTO if self.how == AUTO else f"{self.algorithm} {self.how}"


@final
@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know.

    Attributes:
        candidates: What is compared with the baselines.
        numels: Elements of the fp32 gradient, size by size.
        runs: Rounds that count; None lets the time of a round decide.
        warm_up: Rounds before them, at each size.
        ranks_per_host: Ranks on each host.
        interface: Whose counters tell what this host sent; None where other traffic shares them.
        addresses: Address of each host, in order.
        goodput_port: First of the ports for raw streams; None where the link is modelled.
        goodput_nbytes: The least that these streams carry: with less there is no pace to time.
        throttle_bit_s: Modelled link rate in bits per second; None where the link is real.
        timeout_seconds: Bound on every wait.
    """

    candidates: tuple[Candidate, ...]
    numels: tuple[int, ...]
    runs: int | None
    warm_up: int
    ranks_per_host: int
    interface: str | None
    addresses: tuple[str, ...]
    goodput_port: int | None
    goodput_nbytes: int
    throttle_bit_s: float | None
    timeout_seconds: float

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return len(self.addresses) * self.ranks_per_host

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            **{
                **fields,
                "candidates": tuple(Candidate(**candidate) for candidate in fields["candidates"]),
                "numels": tuple(fields["numels"]),
                "addresses": tuple(fields["addresses"]),
            }
        )


@final
@dataclass(frozen=True)
class Track:
    """One contender on one rank, an entry a round.

    Attributes:
        seconds: Wall-clock time of the call.
        cpu_seconds: Processor time of all threads of the process meanwhile.
        counted_nbytes: What the host's interface sent meanwhile; empty where it has no counters of its own.
        payload_nbytes: Payload bytes that this rank sent, by the transport's count; empty where nobody counts them.
        digests: Hash of the result's bits.
        nmses: Relative squared error of the mean; rank 0 only.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counted_nbytes: list[int] = field(default_factory=list)
    payload_nbytes: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    nmses: list[float] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Advanced:
    """Rank 0 finished some of the rounds of a size."""

    numel: int
    rounds: int
    total: int


@final
@dataclass(frozen=True)
class Measured:
    """All that one rank found at one size.

    Attributes:
        rank: Which one.
        numel: Elements of the gradient.
        tracks: By contender.
        goodput_seconds: Of each exchange of raw streams; empty where the link is modelled.
        exchanged_nbytes: Bytes of each such exchange, in each direction.
        allowed_nmses: Largest error a correct result can have, by contender; rank 0 only.
        settle_calls: Calls that `auto` had before the first round, in which to choose.
        chosen: What `auto` came to, in its own words; None where it was not asked for, or does not say.
    """

    rank: int
    numel: int
    tracks: dict[str, Track]
    goodput_seconds: list[float]
    exchanged_nbytes: int
    allowed_nmses: dict[str, float]
    settle_calls: int = 0
    chosen: str | None = None


Event: TypeAlias = Advanced | Measured
_PREFIX = '{"event": '


def to_line(event: Event) -> str:
    r"""Writes an event as one line of JSON, newline included.

    Example:
        >>> to_line(Advanced(numel=8, rounds=3, total=5))
        '{"event": "Advanced", "numel": 8, "rounds": 3, "total": 5}\n'
    """
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Reads what `to_line` wrote; None for a line that is something else, such as a library's.

    Example:
        >>> from_line(to_line(Advanced(numel=8, rounds=3, total=5)))
        Advanced(numel=8, rounds=3, total=5)
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
