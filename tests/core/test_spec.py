"""Specs round-trip through their text, and bad ones are refused with what would be good."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.core.spec import (
    EXACT,
    Cast,
    Identity,
    PhaseSpecs,
    Spec,
    Uniform,
    block_size_of,
    parse_spec,
    parse_specs,
)
from cgx.errors import CgxError, SpecError
from tests.strategies import ALL_UNIFORM, uniform_specs

_specs: st.SearchStrategy[Spec] = st.one_of(st.just(Identity()), st.just(Cast()), uniform_specs)


@pytest.mark.parametrize("spec", [Identity(), Cast(), *ALL_UNIFORM], ids=str)
def test_text_round_trips(spec: Spec) -> None:
    assert parse_spec(str(spec)) == spec


@given(_specs, _specs)
def test_pair_round_trips(scatter: Spec, gather: Spec) -> None:
    pair = PhaseSpecs(scatter, gather)
    assert parse_specs(str(pair)) == pair


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("identity", Identity()),
        ("bf16", Cast()),
        ("cast:bf16", Cast()),
        ("uniform", Uniform()),
        ("uniform:3", Uniform(3)),
        (" uniform:3/scale=fp32 ", Uniform(3, scale="fp32")),
        ("uniform:8/rounding=nearest/block=32", Uniform(8, 32, "nearest")),
        ("uniform/block=65536", Uniform(block_size=65536)),
    ],
)
def test_short_forms(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


def test_defaults_are_the_documented_ones() -> None:
    assert str(parse_spec("uniform:4")) == "uniform:4/block=128/rounding=dithered/scale=bf16"


def test_one_spec_serves_both_phases() -> None:
    assert parse_specs("uniform:4") == PhaseSpecs(Uniform(4), Uniform(4))
    assert parse_specs("uniform:4+bf16") == PhaseSpecs(Uniform(4), Cast())
    assert str(EXACT) == "identity"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown spec ''"),
        ("gzip", "unknown spec 'gzip'"),
        ("identity:1", "unknown spec"),
        ("identity/block=32", "unknown spec"),
        ("bf16/block=32", "unknown spec"),
        ("cast:fp8", "unknown spec"),
        ("UNIFORM:4", "unknown spec"),
        ("uniform:0", "bits must be an integer from 1 to 8, found 0"),
        ("uniform:9", "found 9"),
        ("uniform:-1", "bits must be a whole number, found '-1'"),
        ("uniform:4.5", "found '4.5'"),
        ("uniform:four", "found 'four'"),
        ("uniform:²", "bits must be a whole number"),
        ("uniform:4:5", "found '4:5'"),
        ("uniform:4/block=33", "power of two from 32 to 65536, found 33"),
        ("uniform:4/block=16", "found 16"),
        ("uniform:4/block=131072", "found 131072"),
        ("uniform:4/block=", "block_size must be a whole number, found ''"),
        ("uniform:4/rounding=up", "nearest, stochastic, dithered; found 'up'"),
        ("uniform:4/scale=fp16", "fp32, bf16; found 'fp16'"),
        ("uniform:4/colour=red", "cannot use option 'colour=red'"),
        ("uniform:4/block", "cannot use option 'block'"),
        ("uniform:4/", "cannot use option ''"),
        ("uniform:4/block=32/block=64", "cannot use option 'block=64'"),
        ("uniform:4 /block=32", "found '4 '"),
        ("a+b+c", "joins 3 specs"),
        ("uniform:4+", "unknown spec ''"),
        ("+uniform:4", "unknown spec ''"),
    ],
)
def test_bad_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_specs(text)
    assert said in str(error.value)


@given(st.text(max_size=40))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    try:
        pair = parse_specs(text)
    except SpecError:
        return
    assert parse_specs(str(pair)) == pair


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": 4.0},
        {"bits": "4"},
        {"bits": True},
        {"block_size": 0},
        {"block_size": -32},
        {"block_size": 96},
        {"block_size": 128.0},
        {"rounding": "NEAREST"},
        {"scale": None},
    ],
    ids=str,
)
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Uniform(**fields)


def test_errors_of_specs_are_value_errors_of_ours() -> None:
    assert issubclass(SpecError, ValueError)
    assert issubclass(SpecError, CgxError)


def test_specs_are_frozen_and_hashable() -> None:
    assert len({Uniform(4), Uniform(4), Identity(), Cast()}) == 3
    with pytest.raises(FrozenInstanceError):
        Uniform().bits = 5  # type: ignore[misc]


def test_block_size() -> None:
    assert [block_size_of(s) for s in (Uniform(4, 64), Identity(), Cast())] == [64, 1, 1]
