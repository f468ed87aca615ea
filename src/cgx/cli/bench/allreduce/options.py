"""Reads the lists that `cgx bench allreduce` takes: sizes, links, algorithms and specs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cgx.cli.bench.allreduce.messages import AUTO, Candidate
from cgx.cli.bench.sizes import parse_size
from cgx.core.algorithm import ALGORITHMS
from cgx.core.spec import parse_specs
from cgx.errors import SpecError
from cgx.testbed import parse_rate

_RANGE: Final = re.compile(r"(?P<first>.+?)\.\.(?P<last>.+?)(?:/(?P<factor>.*))?")
_FACTOR: Final = 4


def split(text: str) -> list[str]:
    """The entries of a list with commas, each once.

    Example:
        >>> split("ring, all_gather,ring")
        ['ring', 'all_gather']
    """
    return list(dict.fromkeys(entry for part in text.split(",") if (entry := part.strip())))


def parse_sizes(text: str) -> list[int]:
    """Reads sizes of gradients, smallest first.

    Args:
        text: Sizes and ranges, with commas between. ``A..B`` is A, 4 A, 16 A, ... and B itself; ``A..B/2`` doubles.

    Returns:
        Bytes, each size once.

    Raises:
        SpecError: A size or range is none, or the list is empty.

    Example:
        >>> parse_sizes("25MB,1KB..20KB")
        [1000, 4000, 16000, 20000, 25000000]
        >>> parse_sizes("1KB..8KB/2")
        [1000, 2000, 4000, 8000]
    """
    sizes = {nbytes for entry in _filled("--size", text) for nbytes in _sizes(entry)}
    return sorted(sizes)


def _sizes(entry: str) -> Iterator[int]:
    match = _RANGE.fullmatch(entry)
    if match is None:
        yield parse_size(entry)
        return
    first, last, factor = parse_size(match["first"]), parse_size(match["last"]), match["factor"]
    if factor is not None and not (factor.isdecimal() and int(factor) > 1):
        raise SpecError(
            f"{entry!r}: a range grows by a whole number from 2 on, such as 1KB..256MB/2; found {factor!r}."
        )
    if first > last:
        raise SpecError(f"{entry!r} ends below its start: write the smaller size first.")
    while first < last:
        yield first
        first *= int(factor or _FACTOR)
    yield last


def parse_links(text: str) -> list[float | None]:
    """Reads link rates in bits per second, in the order given; None is no limit.

    Raises:
        SpecError: A rate is none, or the list is empty.

    Example:
        >>> parse_links("1gbit,none")
        [1000000000.0, None]
    """
    return list(dict.fromkeys(parse_rate(entry) for entry in _filled("--link", text)))


def parse_candidates(specs: str, algorithms: str, how: str, *, ranks_per_host: int) -> tuple[Candidate, ...]:
    """Reads what is to be compared with the baselines: every spec by every algorithm, and ``auto`` at the end.

    Args:
        specs: Specs, each of both phases or ``A+B``.
        algorithms: Names of reducers.
        how: More specs, and ``auto``.
        ranks_per_host: Ranks on each host; without several there is no hierarchy.

    Raises:
        SpecError: An entry is unknown, or cannot be had here.

    Example:
        >>> [each.name for each in parse_candidates("uniform:4", "ring", "auto,bf16", ranks_per_host=1)]
        ['ring uniform:4', 'ring bf16', 'auto']
    """
    names = _filled("--algorithm", algorithms)
    for name in names:
        if name not in ALGORITHMS:
            raise SpecError(f"{name!r} is no algorithm: have {', '.join(ALGORITHMS)}.")
    if "hierarchical" in names and ranks_per_host == 1:
        raise SpecError("hierarchical reduces inside each host first: ask for several with --ranks-per-host.")
    hows = split(f"{specs},{how}")
    by_hand = _filled("--spec", ",".join(each for each in hows if each != AUTO))
    for each in by_hand:
        parse_specs(each)
    chosen = [Candidate(AUTO, AUTO)] if AUTO in hows else []
    return (*(Candidate(each, name) for name in names for each in by_hand), *chosen)


def _filled(option: str, text: str) -> list[str]:
    entries = split(text)
    if not entries:
        raise SpecError(f"{option} is empty: name at least one.")
    return entries
