"""Codecs broken on purpose fail the law suite, each in the laws that its fault offends."""

from __future__ import annotations

import pytest

from cgx.core.spec import Uniform
from tests.laws import broken
from tests.laws.families import UNIFORM, Subject
from tests.laws.suite import LAWS

_NEAREST, _STOCHASTIC = Uniform(6, 32, "nearest", "bf16"), Uniform(8, 32, "stochastic", "bf16")
_DITHERED = Uniform(4, 128, "dithered", "bf16")

FAULTS: list[tuple[type[broken.Wrapped], Uniform, set[str]]] = [
    (broken.Truncates, _NEAREST, {"bound", "contraction"}),
    (broken.Truncates, _STOCHASTIC, {"unbiased", "determinism"}),
    (broken.Truncates, _DITHERED, {"bound", "unbiased", "contraction"}),
    (broken.Clips, _STOCHASTIC, {"bound", "unbiased"}),
    (broken.DropsTheTail, _DITHERED, {"bound", "unbiased", "conservation", "fixed_points", "fusion"}),
    (broken.HidesNan, _DITHERED, {"non_finite"}),
    (broken.ForgetsTheResidual, _DITHERED, {"conservation", "non_finite"}),
    (broken.RoundsTheResidual, _DITHERED, {"conservation"}),
    (broken.SharesScales, _NEAREST, {"bound", "independence", "non_finite"}),
    (broken.RepeatsItsNoise, _DITHERED, {"determinism"}),
    (broken.LeavesPadding, _DITHERED, {"size"}),
    (broken.ReplacesForAdd, _DITHERED, {"fusion"}),
]


@pytest.mark.parametrize(
    ("fault", "spec", "law"),
    [
        pytest.param(fault, spec, law, id=f"{fault.__name__}-{spec.rounding}-{law}")
        for fault, spec, laws in FAULTS
        for law in sorted(laws)
    ],
)
def test_fault_fails_the_suite(fault: type[broken.Wrapped], spec: Uniform, law: str) -> None:
    with pytest.raises(AssertionError):
        LAWS[law][0](Subject(spec, UNIFORM, fault(spec)))


def test_every_law_catches_a_fault_and_bad_faults_are_caught_thrice() -> None:
    assert set().union(*(laws for _, _, laws in FAULTS)) == set(LAWS)
    assert sum(len(laws) >= 3 for _, _, laws in FAULTS) >= 2


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", [_NEAREST, _STOCHASTIC, _DITHERED], ids=lambda spec: spec.rounding)
def test_the_wrapper_alone_is_innocent(spec: Uniform, law: str) -> None:
    check, applies = LAWS[law]
    subject = Subject(spec, UNIFORM, broken.Wrapped(spec))
    if applies(subject):
        check(subject)
