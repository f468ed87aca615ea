"""What the demo's ranks tell its supervisor, as JSON lines: each run's steps and its outcome."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, final

STOCK = "off"


@final
@dataclass(frozen=True)
class Run:
    """One training: a model, how its gradients travel, and the seed of its weights and data.

    Attributes:
        model: A key of `cgx.cli.demo.models.TASKS`.
        how: What `cgx.compress` takes as text; `off` is stock DDP.
        seed: Seeds the weights, the order of the data and the rounding.
        steps: Training steps.
    """

    model: str
    how: str
    seed: int
    steps: int


@final
@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know.

    Attributes:
        runs: What to train, one after another.
        interface: The network interface whose counters tell what was sent.
        ranks_on_interface: How many ranks send through it: 1 on emulated hosts, all on loopback.
        throttle_bit_s: Modelled link rate in bits per second; None where the link is real. What
            was sent is then taken from the handle, for loopback also carries the model's own talk.
    """

    runs: tuple[Run, ...]
    interface: str
    ranks_on_interface: int
    throttle_bit_s: float | None

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "runs": tuple(Run(**run) for run in fields["runs"])})


@final
@dataclass(frozen=True)
class Started:
    """The ranks begin to prepare a run; compiling and warming up come before its first step."""

    run: int


@final
@dataclass(frozen=True)
class Stepped:
    """Rank 0 finished a step.

    Attributes:
        run: Index into the assignment's runs.
        step: Steps done so far.
        seconds: Wall-clock time of all these steps, without validation.
        loss: Training loss of rank 0's part of the batch, nats.
    """

    run: int
    step: int
    seconds: float
    loss: float


@final
@dataclass(frozen=True)
class Validated:
    """Rank 0 judged the model on the held-out data, while the clock stood still.

    Attributes:
        run: Index into the assignment's runs.
        step: Steps done so far.
        seconds: Wall-clock time of all these steps.
        loss: Mean cross-entropy, nats.
        accuracy: Share of right answers, 0..1.
    """

    run: int
    step: int
    seconds: float
    loss: float
    accuracy: float


@final
@dataclass(frozen=True)
class Finished:
    """The outcome of a run.

    Attributes:
        run: Index into the assignment's runs.
        final_loss: Mean cross-entropy on all held-out data, nats.
        final_accuracy: Share of right answers there, 0..1.
        step_p50_s: Median wall-clock time of a step on rank 0.
        wire_nbytes_per_step: Bytes a rank sent per step, averaged over ranks.
        replicas_identical: Whether parameters and buffers of all ranks have one hash.
    """

    run: int
    final_loss: float
    final_accuracy: float
    step_p50_s: float
    wire_nbytes_per_step: float
    replicas_identical: bool


Event: TypeAlias = Started | Stepped | Validated | Finished

_PREFIX = '{"event": '
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Started, Stepped, Validated, Finished)}


def to_line(event: Event) -> str:
    r"""Writes an event as one line of JSON, newline included.

    Example:
        >>> to_line(Started(run=0))
        '{"event": "Started", "run": 0}\n'
    """
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Reads what `to_line` wrote; None for a line that is something else, such as a library's.

    Example:
        >>> from_line(to_line(Started(run=3)))
        Started(run=3)
        >>> from_line("hello") is None
        True
    """
    if not line.startswith(_PREFIX):
        return None
    fields = json.loads(line)
    event: Event = _KINDS[fields.pop("event")](**fields)
    return event
