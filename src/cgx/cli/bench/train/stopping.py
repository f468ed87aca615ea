"""When enough steps were timed: a confidence interval of the ratio to stock DDP, and what is asked of it.

Looking at the interval after every round, and stopping when it pleases, makes it somewhat narrower than its 95 % say.
Asking for a least number of pairs keeps that small; whoever needs it exact asks for as many pairs as allowed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

NEVER_SLOWER_RATIO: Final = 1.03  # a step may take this much of stock DDP's
_CONFIDENCE: Final = 0.95
_PRECISE_HALF_WIDTH: Final = 0.02


@final
class Goal(StrEnum):
    """What the measurement is for."""

    PRECISE = "precise"
    NEVER_SLOWER = "never-slower"


@final
@dataclass(frozen=True)
class Interval:
    """Where the ratio of two times lies, with 95 % confidence.

    Attributes:
        low: Its lower end.
        high: Its upper end; infinite before two pairs were seen.
    """

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """How far the ends are from the middle, as a share of it."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    def settles(self, goal: Goal) -> bool:
        """Whether it is narrow enough, or lies on one side of the allowed ratio."""
        match goal:
            case Goal.PRECISE:
                return self.half_width < _PRECISE_HALF_WIDTH
            case Goal.NEVER_SLOWER:
                return self.high < NEVER_SLOWER_RATIO or self.low > NEVER_SLOWER_RATIO


def interval(seconds: Sequence[float], baseline_seconds: Sequence[float]) -> Interval:
    """The interval of the ratio of two times, from pairs taken in the same rounds.

    It is Student's for the mean of the logarithms, so that a ratio and its inverse are treated alike.

    Args:
        seconds: Of one way, a round each.
        baseline_seconds: Of the other, in the same rounds.

    Example:
        >>> found = interval([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
        >>> round(found.low, 3), round(found.high, 3)
        (0.179, 5.595)
    """
    from scipy.special import stdtrit  # here, because the options need the names above and no mathematics

    logs = [math.log(own / base) for own, base in zip(seconds, baseline_seconds, strict=True)]
    if len(logs) < 2:
        return Interval(0.0, math.inf)
    quantile = float(stdtrit(len(logs) - 1, (1 + _CONFIDENCE) / 2))
    spread = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return Interval(math.exp(middle - spread), math.exp(middle + spread))


def is_enough(intervals: Iterable[Interval], goal: Goal, *, pairs: int, min_pairs: int, max_pairs: int) -> bool:
    """Whether to stop after this many pairs, with these intervals of the contenders."""
    if pairs < min_pairs:
        return False
    return pairs >= max_pairs or all(each.settles(goal) for each in intervals)
