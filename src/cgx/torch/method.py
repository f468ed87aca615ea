"""How a reduction is to be done, and which options make sense together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.core.spec import PhaseSpecs
from cgx.errors import SpecError

_KEEPS_RESIDUALS: tuple[Algorithm, ...] = ("scatter_reduce", "all_gather")
GIVEN = "given"  # the plan a person gave, where there is only one
Plans = Mapping[str, Mapping[str, PhaseSpecs]]


@final
@dataclass(frozen=True, slots=True)
class Method:
    """How to do a reduction: with the specs of which plan, by which algorithm."""

    plan: str
    algorithm: Algorithm

    def __str__(self) -> str:
        return f"{self.plan} by {self.algorithm}"


def check_algorithm(algorithm: str) -> None:
    """Raises SpecError for the name of no algorithm."""
    if algorithm not in ALGORITHMS:
        raise SpecError(f"algorithm must be one of {', '.join(ALGORITHMS)}; found {algorithm!r}")


def check_options(algorithm: Algorithm, *, has_error_feedback: bool, piece_nbytes: int | None) -> None:
    """Raises SpecError for options of a session that are out of their range or do not go together."""
    if piece_nbytes is not None and piece_nbytes < 1:
        raise SpecError(f"piece_nbytes must be at least 1 byte, or None to choose by size; found {piece_nbytes}")
    check_algorithm(algorithm)
    if has_error_feedback and algorithm not in _KEEPS_RESIDUALS:
        raise SpecError(
            f"error feedback is asked for with {algorithm}, which encodes partial sums, so what is lost belongs to no "
            f"rank; use {' or '.join(_KEEPS_RESIDUALS)}"
        )
