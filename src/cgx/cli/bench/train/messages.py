"""What the supervisor tells the ranks, and what each rank tells the supervisor, as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Final, TypeAlias, final

from cgx.cli.bench.train.stopping import Goal

COMPUTE: Final = "compute"  # takes its turn among the hows: the same step, entirely under `no_sync`


@final
@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know.

    Attributes:
        model: What to train, by name.
        hows: How to average gradients; the first is the baseline.
        batch: Examples of a micro-batch.
        accumulate: Micro-batches of a step.
        steps_per_turn: Steps that a contender makes before the next has its turn.
        warm_up: Most steps that `auto` makes to find its choice before anything counts.
        min_pairs: Least number of turns that count.
        max_pairs: Most.
        goal: What lets them stop between.
        data_workers: Processes of each rank that burn the processor.
        interface: Whose counters tell what this rank's host sent; None where other traffic shares them.
        timeout_seconds: Bound on every wait.
    """

    model: str
    hows: tuple[str, ...]
    batch: int
    accumulate: int
    steps_per_turn: int
    warm_up: int
    min_pairs: int
    max_pairs: int
    goal: Goal
    data_workers: int
    interface: str | None
    timeout_seconds: float

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "hows": tuple(fields["hows"]), "goal": Goal(fields["goal"])})


@final
@dataclass(frozen=True)
class Track:
    """The turns of one contender on one rank; all but the losses are of one step, the mean of a turn's.

    Attributes:
        seconds: Wall-clock time.
        cpu_seconds: Processor time of all threads of the process meanwhile.
        counted_nbytes: What the interface sent meanwhile; empty where it has no counters of its own.
        payload_nbytes: Payload bytes that cgx says this rank sent; empty for all others.
        wait_seconds: Time that cgx says DDP waited for it; empty for all others.
        losses: Of the turn's last micro-batch.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counted_nbytes: list[float] = field(default_factory=list)
    payload_nbytes: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Outcome:
    """What is left of one contender when all turns are over, on one rank.

    Attributes:
        digest: Hash of all parameters.
        nmse: Relative squared error of the gradient that it averages, from the same weights as all others.
        allowed_nmse: The largest that a correct result can have; None where nobody promises anything.
        chosen: What `auto` says is in use, and whether still on trial; None for all others.
        decisions: What `auto` says it decided on its way, with its numbers; None for all others.
    """

    digest: str
    nmse: float
    allowed_nmse: float | None
    chosen: str | None = None
    decisions: list[str] | None = None


@final
@dataclass(frozen=True)
class Advanced:
    """Rank 0 finished a round.

    Attributes:
        rounds: How many so far.
        half_width: Of the widest interval, as a share; infinite after one round.
    """

    rounds: int
    half_width: float


@final
@dataclass(frozen=True)
class Measured:
    """All that one rank found.

    Attributes:
        rank: Which one.
        threads: What torch computes with.
        buffers_nbytes: What DDP broadcasts from rank 0 before a step, such as the averages of batch norms.
        tracks: By contender.
        outcomes: By how.
    """

    rank: int
    threads: int
    buffers_nbytes: int
    tracks: dict[str, Track]
    outcomes: dict[str, Outcome]


Event: TypeAlias = Advanced | Measured
_PREFIX = '{"event": '


def to_line(event: Event) -> str:
    r"""Writes an event as one line of JSON, newline included.

    Example:
        >>> to_line(Advanced(rounds=3, half_width=0.5))
        '{"event": "Advanced", "rounds": 3, "half_width": 0.5}\n'
    """
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Reads what `to_line` wrote; None for a line that is something else, such as a library's.

    Example:
        >>> from_line(to_line(Advanced(rounds=3, half_width=0.5)))
        Advanced(rounds=3, half_width=0.5)
        >>> from_line("hello") is None
        True
    """
    if not line.startswith(_PREFIX):
        return None
    fields = json.loads(line)
    if fields.pop("event") == Advanced.__name__:
        return Advanced(**fields)
    tracks = {name: Track(**track) for name, track in fields["tracks"].items()}
    outcomes = {how: Outcome(**outcome) for how, outcome in fields["outcomes"].items()}
    return Measured(**{**fields, "tracks": tracks, "outcomes": outcomes})
