"""Closed-form errors and sizes against the real codecs and the real reduction."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.collectives.base import Op
from cgx.compressors.registry import compressor_for
from cgx.core.algorithm import ALGORITHMS
from cgx.core.segments import Segment
from cgx.core.spec import EXACT, Spec, parse_spec, parse_specs
from cgx.errors import SpecError
from cgx.policies.expected import (
    Ranges,
    gather_ranges,
    predict_mean_error,
    predict_nbytes,
    predict_pass_error,
)
from tests.conformance.ranks import Settings, reduce_on_threads
from tests.laws.batch import Batch
from tests.strategies import Floats, rng_of

NUMEL = 1 << 18  # errors of so many elements add up to their expectation within half a per cent
BASE = 32


def normal(seed: object, numel: int = NUMEL) -> Floats:
    """Normal elements whose size changes from row to row, as in a matrix's gradient."""
    rng = rng_of("expected", seed)
    rows = np.repeat(rng.lognormal(0, 0.3, -(-numel // 1024)), 1024)[:numel]
    return (rng.standard_normal(numel) * rows).astype(np.float32)


def ranges_of(x: Floats, *, doublings: int = 5) -> Ranges:
    """Ranges of whole blocks of 32 and up."""
    starts = np.arange(0, len(x), BASE)
    weight = np.diff(np.append(starts, len(x))).astype(float)
    low, high = (each.reduceat(x, starts).astype(float) for each in (np.minimum, np.maximum))
    energy = float(np.square(x, dtype=float).sum())
    return gather_ranges(low, high, weight, block_size=BASE, energy=energy, doublings=doublings)


def lost(x: Floats, spec: Spec) -> float:
    """Squared error of encoding and decoding once."""
    batch = Batch(compressor_for(spec), [x])
    (decoded,) = batch.decompress(batch.compress().payload, into=[np.zeros_like(x)])
    return float(np.square(decoded.astype(float) - x).sum())


@pytest.mark.parametrize("block", [32, 128, 1024])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scale", ["bf16", "fp32"])
@pytest.mark.parametrize("rounding", ["dithered", "stochastic", "nearest"])
def test_error_of_a_pass(rounding: str, scale: str, bits: int, block: int) -> None:
    spec = parse_spec(f"uniform:{bits}/block={block}/rounding={rounding}/scale={scale}")
    x = normal(spec)
    assert predict_pass_error(spec, ranges_of(x)) == pytest.approx(lost(x, spec), rel=0.025)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_dithered_needs_no_assumption_about_the_input(bits: int) -> None:
    """Two values only: all elements lie on the ends of their blocks, where the other roundings make no error."""
    x = rng_of("signs").choice([-1.0, 1.0], NUMEL).astype(np.float32)
    dithered, nearest = (
        parse_spec(f"uniform:{bits}/rounding={rounding}/scale=fp32") for rounding in ("dithered", "nearest")
    )
    assert predict_pass_error(dithered, ranges_of(x)) == pytest.approx(lost(x, dithered), rel=0.01)
    assert lost(x, nearest) < 1e-9 * predict_pass_error(nearest, ranges_of(x))


def test_error_of_casts() -> None:
    x = normal("cast")
    cast, identity = parse_spec("bf16"), parse_spec("identity")
    assert predict_pass_error(cast, ranges_of(x)) == pytest.approx(lost(x, cast), rel=0.03)
    assert predict_pass_error(cast, ranges_of(x), dtype="bf16") == 0
    assert predict_pass_error(identity, ranges_of(x)) == lost(x, identity) == 0


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("text", ["uniform:4", "uniform:3+uniform:6", "uniform:6+uniform:3", "uniform:3+identity"])
def test_error_of_the_reduced_mean(text: str, world_size: int) -> None:
    """Through the real reduction: which of the phases counts how much shows where their bits differ."""
    specs, numel = parse_specs(text), NUMEL // 4
    # Of one size throughout: which rank owns which stripe would show otherwise.
    parts = rng_of("mean").standard_normal((world_size + 1, numel)).astype(np.float32)
    inputs = [{"w": parts[-1] + part} for part in parts[:-1]]
    results = reduce_on_threads(inputs, [Segment("w", (numel,), "fp32", specs)], Settings(op=Op.AVG))
    mean = np.mean([each["w"].astype(float) for each in inputs], axis=0)
    found = float(np.square(results[0].values["w"] - mean).sum())
    ranges = [ranges_of(each["w"]) for each in inputs]
    part = Ranges(
        float(np.mean([each.energy for each in ranges])),
        {size: float(np.mean([each.squared[size] for each in ranges])) for size in ranges[0].squared},
    )
    predicted = predict_mean_error(specs, part, ranges_of(mean.astype(np.float32)), world_size=world_size)
    assert predicted == pytest.approx(found, rel=0.02)


def test_alone_nothing_is_lost() -> None:
    assert predict_mean_error(parse_specs("uniform:2"), Ranges(1, {128: 1}), Ranges(1, {128: 1}), world_size=1) == 0


def test_ranges_of_larger_blocks_are_those_of_the_elements() -> None:
    """Whole and partial blocks, and a last block without a neighbour."""
    for numel in (1, 31, 33, 100, 1000):
        x, joined = normal(numel, numel), ranges_of(normal(numel, numel), doublings=4).squared
        for size, squared in joined.items():
            blocks = [x[at : at + size].astype(float) for at in range(0, numel, size)]
            assert squared == pytest.approx(sum(len(block) * np.ptp(block) ** 2 for block in blocks), rel=1e-12)
    none = np.zeros(0)
    assert gather_ranges(none, none, none, block_size=32, energy=0.0, doublings=2).squared == {32: 0, 64: 0, 128: 0}


def test_weights_are_the_callers_metric() -> None:
    low, high = np.array([0.0, 0.0]), np.array([1.0, 2.0])
    weighted = gather_ranges(low, high, np.array([32.0, 32.0 * 0.25]), block_size=32, energy=1.0)
    assert weighted.squared == {32: 64.0}


def test_an_unknown_block_size_is_refused() -> None:
    with pytest.raises(SpecError, match=r"blocks of \[64\] elements are known"):
        predict_pass_error(parse_spec("uniform:4"), Ranges(1.0, {64: 1.0}))


def test_bytes_of_both_phases() -> None:
    """A rank sends every element once per phase, but for its own share."""
    copy = {bits: 4096 * bits // 8 + 128 for bits in (3, 4, 5)}  # 32 blocks with a scale of 4 bytes
    assert predict_nbytes(parse_specs("uniform:4"), 4096, world_size=4) == 2 * copy[4] * 3 // 4
    assert predict_nbytes(parse_specs("uniform:3+uniform:5"), 4096, world_size=4) == (copy[3] + copy[5]) * 3 // 4
    assert predict_nbytes(EXACT, 4096, world_size=2, dtype="bf16") == 2 * 4096
    assert predict_nbytes(parse_specs("uniform:4"), 4096, world_size=4, algorithm="all_gather") == 3 * copy[4]
    for algorithm in ALGORITHMS:
        assert predict_nbytes(parse_specs("uniform:4"), 4096, world_size=1, algorithm=algorithm) == 0
