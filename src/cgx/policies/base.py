"""What a policy of specs is, the table it reads, and the laws that ``choose`` keeps for every policy.

A policy sees a ``Table``: for each layer and each candidate spec, bytes and error. Errors are squared errors of the
reduced mean in whatever metric the caller chose; all that matters here is that they add up over layers.

1 budget: when any choice has an error of at most ``max_error``, so has the result. When none has, the result is the
  most accurate choice, and says so.
2 size: never more bytes than the default or the previous choice, whichever of them fit the budget.
3 purity: the same table, budget and previous choice give the same result; random searches carry their seed.
4 equality: ``BySize``, ``Linear``, ``KMeans`` and ``Bayesian`` propose equal specs for equal layers. ``LGreco`` may
  not: the smallest choice can need two equal layers to differ.
5 degenerate tables (an error that is not a number where the default needs one, nothing but zeros, no layers): the
  previous choice stays, else the default, with the reason.

Proposals may break laws 1 and 2; ``choose`` then takes the previous choice or the default. A layer whose errors are all
zero had a gradient of zero, which says nothing about the next one: proposals keep the default for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from cgx.core.spec import PhaseSpecs
from cgx.errors import SpecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter and what each candidate would cost and lose on it.

    Args:
        name: The parameter's name.
        numel: Elements.
        norm: Euclidean norm of the gradient.
        nbytes: By candidate: bytes that a rank sends, both phases together.
        errors: By candidate: squared error of the reduced mean in the caller's metric; infinity where a candidate
            cannot serve this layer. What is no number or negative counts as infinity.
    """

    name: str
    numel: int
    norm: float
    nbytes: tuple[int, ...]
    errors: tuple[float, ...]


@final
@dataclass(frozen=True, slots=True)
class Table:
    """All layers and all candidates.

    Args:
        candidates: The specs to choose from, in any order.
        default: Index of the candidate that serves all layers when nothing better is found (uniform 4-bit).
        layers: With one entry of ``nbytes`` and ``errors`` per candidate.

    Raises:
        SpecError: Sizes do not match.
    """

    candidates: tuple[PhaseSpecs, ...]
    default: int
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        count = len(self.candidates)
        if not 0 <= self.default < count:
            raise SpecError(f"the default is candidate {self.default}; there are {count}")
        for layer in self.layers:
            if (len(layer.nbytes), len(layer.errors)) != (count, count):
                raise SpecError(
                    f"layer {layer.name!r} has {len(layer.nbytes)} sizes and {len(layer.errors)} errors; "
                    f"there are {count} candidates"
                )

    @property
    def nbytes(self) -> Ints:
        """Bytes, shape (layers, candidates)."""
        return np.array([layer.nbytes for layer in self.layers], np.int64).reshape(-1, len(self.candidates))

    @property
    def errors(self) -> Floats:
        """Errors, shape (layers, candidates), infinite where they cannot be used."""
        found = np.array([layer.errors for layer in self.layers], np.float64).reshape(-1, len(self.candidates))
        return np.where(found >= 0, found, np.inf)

    @property
    def default_choice(self) -> tuple[int, ...]:
        """The default for every layer."""
        return (self.default,) * len(self.layers)

    @property
    def default_error(self) -> float:
        """Error of the default: the budget of a policy that is to lose no more than that (alpha = 1)."""
        return self.error_of(self.default_choice)

    def nbytes_of(self, indices: Sequence[int]) -> int:
        """Bytes of one candidate per layer."""
        return sum(layer.nbytes[i] for layer, i in zip(self.layers, indices, strict=True))

    def error_of(self, indices: Sequence[int]) -> float:
        """Error of one candidate per layer, correctly rounded: equal choices have equal sums in any order."""
        return add_up(layer.errors[i] for layer, i in zip(self.layers, indices, strict=True))


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate per layer, and why.

    Args:
        indices: Index of the candidate of each layer.
        nbytes: Bytes of all layers.
        error: Error of all layers, infinite when it is not known.
        fits: It is within the budget that was asked for.
        reason: One sentence for reports.
    """

    indices: tuple[int, ...]
    nbytes: int
    error: float
    fits: bool
    reason: str

    def specs(self, table: Table) -> dict[str, PhaseSpecs]:
        """Specs by the name of the layer."""
        return {layer.name: table.candidates[i] for layer, i in zip(table.layers, self.indices, strict=True)}


class Policy(Protocol):
    """Proposes few bytes for an error budget; ``choose`` holds it to the laws."""

    def propose(self, table: Table, max_error: float) -> Sequence[int] | None:
        """One candidate per layer, or None. The table is sound: every default has a finite error, some above zero."""
        ...


def choose(
    policy: Policy, table: Table, *, max_error: float | None = None, previous: Sequence[int] | None = None
) -> Choice:
    """The policy's choice where it keeps the laws at the head of this file, else the best that does.

    Args:
        policy: Which policy.
        table: What it chooses from.
        max_error: Error budget, in the unit of the table's errors; None for what the default loses.
        previous: The choice in use, on the same layers and candidates.

    Raises:
        SpecError: The budget is not a finite number of at least zero, or ``previous`` belongs to another table.
    """
    check_previous(table, previous)
    if max_error is not None and not 0 <= max_error < math.inf:
        raise SpecError(f"an error budget is a finite number of at least zero, found {max_error!r}")
    if fault := find_fault(table):
        return keep(table, previous, fault)
    limit = table.default_error if max_error is None else max_error
    # Of equals the first is taken: what is in use stays.
    options = [
        (previous, "nothing smaller than the previous choice was found within the error budget"),
        (table.default_choice, "nothing smaller than the default was found within the error budget"),
        (policy.propose(pin_silent(table), limit), "smallest found within the error budget"),
    ]
    found = [make_choice(table, indices, limit, reason) for indices, reason in options if indices is not None]
    fitting = [choice for choice in found if choice.fits]
    if fitting:
        return min(fitting, key=lambda choice: (choice.nbytes, choice.error))
    accurate = make_choice(
        table,
        most_accurate(table),
        limit,
        "the most accurate choice: nothing smaller was found within the error budget",
    )
    if accurate.fits:
        return accurate
    reason = f"no choice is within the error budget of {limit:.3g}: the most accurate one loses {accurate.error:.3g}"
    return replace(accurate, reason=reason)


def make_choice(table: Table, indices: Sequence[int], max_error: float, reason: str) -> Choice:
    """Sums up one candidate per layer."""
    error = table.error_of(indices)
    return Choice(tuple(int(i) for i in indices), table.nbytes_of(indices), error, error <= max_error, reason)


def keep(table: Table, previous: Sequence[int] | None, fault: str) -> Choice:
    """The choice for a table that nothing can be read from."""
    kept, name = (table.default_choice, "the default") if previous is None else (previous, "the previous choice")
    return make_choice(table, kept, math.inf, f"{name} is kept: {fault}")


def check_previous(table: Table, previous: Sequence[int] | None) -> None:
    """Refuses a choice that is not one of this table's.

    Raises:
        SpecError: Its length or an index is wrong.
    """
    if previous is None:
        return
    count = len(table.candidates)
    if len(previous) != len(table.layers) or not all(0 <= i < count for i in previous):
        raise SpecError(
            f"the previous choice {list(previous)[:8]} belongs to another table; this one has "
            f"{len(table.layers)} layers and {count} candidates"
        )


def find_fault(table: Table) -> str | None:
    """Why nothing can be chosen by this table, or None."""
    if not table.layers:
        return "there are no layers"
    for layer in table.layers:
        error = layer.errors[table.default]
        if not (0 <= error < math.inf and 0 <= layer.norm < math.inf):
            return f"layer {layer.name!r} has error {error} with the default, and norm {layer.norm}"
    if not table.default_error < math.inf:
        return "the errors of the default add up to infinity"
    finite = np.isfinite(table.errors)
    if not table.errors[finite].any():
        return "all errors are zero, so they tell nothing apart"
    return None


def pin_silent(table: Table) -> Table:
    """The same table, in which layers without any error can have the default only."""

    def pinned(layer: Layer) -> Layer:
        if any(0 < error < math.inf for error in layer.errors):
            return layer
        return replace(layer, errors=tuple(0.0 if i == table.default else math.inf for i in range(len(layer.errors))))

    return replace(table, layers=tuple(pinned(layer) for layer in table.layers))


def most_accurate(table: Table) -> tuple[int, ...]:
    """The least error each layer can have, in the fewest bytes."""
    errors, nbytes = table.errors, table.nbytes
    is_least = errors == errors.min(axis=1, keepdims=True)
    return tuple(np.where(is_least, nbytes, np.iinfo(np.int64).max).argmin(axis=1).tolist())


def find_equal_layers(table: Table) -> Ints:
    """A number for each layer, shape (layers,), the same for layers that differ in nothing but their names."""
    numbers: dict[tuple[object, ...], int] = {}
    keys = [(layer.numel, layer.norm, layer.nbytes, layer.errors) for layer in table.layers]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def add_up(values: Iterable[float]) -> float:
    """Correctly rounded sum; infinity where it overflows or an addend is not a number of at least zero."""
    found = list(values)
    if not all(value >= 0 for value in found):
        return math.inf
    try:
        return math.fsum(found)
    except OverflowError:
        return math.inf
