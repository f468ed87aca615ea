"""Every registered compressor keeps the ten laws."""

from __future__ import annotations

import pytest

from cgx.compressors import registry
from tests.laws.families import Subject
from tests.laws.subjects import SUBJECTS
from tests.laws.suite import LAWS

_TRIALS = [
    pytest.param(law, subject, id=f"{law}-{subject}")
    for law, (_, applies) in LAWS.items()
    for subject in SUBJECTS
    if applies(subject)
]


@pytest.mark.parametrize(("law", "subject"), _TRIALS)
def test_law(law: str, subject: Subject) -> None:
    LAWS[law][0](subject)


def test_every_registered_codec_is_on_trial() -> None:
    assert {type(subject.spec) for subject in SUBJECTS} == set(registry._FACTORIES)
