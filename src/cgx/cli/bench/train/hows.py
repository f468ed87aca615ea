"""The ways to average gradients that `cgx bench train` compares, as text."""

from __future__ import annotations

from typing import Final

from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.core.spec import PhaseSpecs, parse_specs
from cgx.errors import SpecError

OFF: Final = "off"  # stock DDP, the baseline of every other
AUTO: Final = "auto"
FP16: Final = "ddp-fp16"  # PyTorch's hook
_POWERSGD: Final = "powersgd"  # PyTorch's hook, with a rank
_LEAST_OF_AUTO: Final = "uniform:4"  # the fewest bits that `auto` chooses


def parse_hows(text: str) -> list[str]:
    """Reads a comma-separated list of ways; stock DDP comes first, for the others are compared with it.

    Raises:
        SpecError: One of them is unknown.

    Example:
        >>> parse_hows("uniform:4@all_gather, powersgd:2")
        ['off', 'uniform:4@all_gather', 'powersgd:2']
    """
    named = [how for part in text.split(",") if (how := part.strip())]
    for how in named:
        if how not in (OFF, AUTO, FP16) and powersgd_rank(how) is None:
            split_algorithm(how)
            coarsest_specs(how)
    return list(dict.fromkeys([OFF, *named]))


def powersgd_rank(how: str) -> int | None:
    """The rank that PyTorch's PowerSGD hook is asked for; None for any other way.

    Raises:
        SpecError: It names PowerSGD without a rank above zero.

    Example:
        >>> powersgd_rank("powersgd:4"), powersgd_rank("uniform:4")
        (4, None)
    """
    name, _, rank = how.partition(":")
    if name != _POWERSGD:
        return None
    if not (rank.isdecimal() and int(rank) > 0):
        raise SpecError(f"{how!r} names no rank of the approximation: write one, such as {_POWERSGD}:4.")
    return int(rank)


def split_algorithm(how: str) -> tuple[str, Algorithm]:
    """A way of cgx's and, behind an ``@``, the algorithm.

    Raises:
        SpecError: There is no such algorithm.

    Example:
        >>> split_algorithm("uniform:4@ring"), split_algorithm("auto")
        (('uniform:4', 'ring'), ('auto', 'scatter_reduce'))
    """
    spec, _, name = how.partition("@")
    for algorithm in ALGORITHMS:
        if algorithm == (name or "scatter_reduce"):
            return spec, algorithm
    raise SpecError(f"{how!r} names no algorithm: write one of {', '.join(ALGORITHMS)} behind the @.")


def is_cgx(how: str) -> bool:
    """Whether ``cgx.compress`` does it, rather than DDP alone or a hook of PyTorch's."""
    return how not in (OFF, FP16) and powersgd_rank(how) is None


def coarsest_specs(how: str) -> PhaseSpecs:
    """The specs with the largest error that a way of cgx's may use."""
    return parse_specs(_LEAST_OF_AUTO if how == AUTO else split_algorithm(how)[0])
