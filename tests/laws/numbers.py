"""Laws about the numbers that come back: 2 bound, 3 unbiased, 4 conservation, 5 fixed points, 10 contraction."""

from __future__ import annotations

import numpy as np

from tests.laws.batch import Batch
from tests.laws.families import F32_MAX, Subject
from tests.strategies import DTYPES, PATTERNS, Floats, gradient, rng_of

_KEYS = 1024


def _numels(subject: Subject) -> list[int]:
    """Whole granules and a tail, a tail alone, one element, none."""
    granule = max(32, subject.granule_numel)
    return [2 * granule + 33, granule, 31, 1, 0]


def _rows(subject: Subject, pattern: str) -> list[Floats]:
    return [gradient(pattern, numel, seed=subject) for numel in _numels(subject)]


def check_bound(subject: Subject) -> None:
    """Every element stays within `error_bound` steps of its granule, for every dtype and kind of input."""
    for pattern in PATTERNS:
        for dtype in DTYPES:
            batch = Batch(subject.compressor, _rows(subject, pattern), dtype)
            for sent, found in zip(batch.inputs, batch.round_trip(), strict=True):
                allowed, poisoned = subject.error_allowed(sent)
                assert np.isnan(found[poisoned]).all(), f"{pattern}, {dtype}: NaN was hidden"
                with np.errstate(all="ignore"):
                    error = np.abs(found.astype(np.float64) - sent)
                    # Levels, and products on the way to them, may lie beyond the largest float32.
                    may_overflow = np.abs(sent).max(initial=0) > F32_MAX / 4
                is_kept = (error <= allowed) | poisoned | (np.isinf(found) & may_overflow)
                assert is_kept.all(), (
                    f"{pattern}, {dtype}: error {error[~is_kept].max()}, allowed {allowed[~is_kept].min()}"
                )


def check_unbiased(subject: Subject) -> None:
    """The mean over keys is the input, for each element and, more sharply, over all elements."""
    block = max(32, subject.granule_numel)
    x = gradient("normal", block + 33, seed=subject)
    batch = Batch(subject.compressor, [x] * _KEYS, starts=[0] * _KEYS)
    found = np.stack(batch.round_trip()).astype(np.float64)
    step = subject.family.step(subject.spec, x)
    assert (found[:, step == 0] == x[step == 0]).all()
    error = (found - x)[:, step > 0] / step[step > 0]
    # Random rounding of either kind keeps an element's standard deviation below half a step. Truncating
    # a fixed-point code costs up to 2**-16 of a step, and fp32 arithmetic three times that at 8 bits.
    sigma, slack = 0.5 / np.sqrt(_KEYS), 4 * 2.0**-16
    if error.size:
        each = np.abs(error.mean(axis=0)).max()
        assert each <= 6 * sigma + slack, f"mean error of an element: {each} steps"
        together = abs(error.mean())
        allowed = 4 * sigma / np.sqrt(error.shape[1]) + slack
        assert together <= allowed, f"mean error of all elements: {together} steps"


def check_conservation(subject: Subject) -> None:
    """Input times scale plus old residual equals decoded plus new residual, to 2 ulp of the block's largest."""
    for pattern in ("normal", "magnitudes", "shifted", "outlier", "zeros", "subnormal"):
        for dtype in DTYPES:
            for scale in (1.0, 1 / 3):
                rows = _rows(subject, pattern)
                batch = Batch(subject.compressor, rows, dtype)
                before = [gradient(pattern, len(row), seed="residual") * np.float32(0.1) for row in rows]
                encoded = batch.compress(scale=scale, residual=before)
                decoded = batch.decompress(encoded.payload)
                for x, owed, found, left in zip(batch.inputs, before, decoded, encoded.residual, strict=True):
                    _compare_sums(subject, x * np.float32(scale), owed, found, left)


def _compare_sums(subject: Subject, scaled: Floats, owed: Floats, found: Floats, left: Floats) -> None:
    lost = (scaled.astype(np.float64) + owed) - (found.astype(np.float64) + left)
    size = subject.granule_numel
    largest = np.maximum.reduce([np.abs(a) for a in (scaled, owed, found, left)])
    for first in range(0, len(scaled), size):
        inside = slice(first, first + size)
        # In the block's largest and not each element's: all of a block share one scale.
        allowed = 2 * np.spacing(largest[inside].max())
        worst = np.abs(lost[inside]).max()
        assert worst <= allowed, f"{worst} was lost where {allowed} is rounding"


def check_fixed_points(subject: Subject) -> None:
    """Zeros and representable constants come back exactly; so does a grid of powers of two, if not dithered."""
    for numel in _numels(subject):
        for constant in (0.0, -0.0, 1.0, -2.5, 0.0078125, -(2.0**-100), 2.0**100):
            _expect_exact(subject, np.full(numel, constant, np.float32), f"constant {constant}")
        if getattr(subject.spec, "rounding", None) == "dithered":
            continue
        for exponent in (-20, 0, 20):
            _expect_exact(subject, _on_grid(subject, numel, exponent), f"grid of 2**{exponent}")


def _on_grid(subject: Subject, numel: int, exponent: int) -> Floats:
    """Levels `step * (code - half)` with both ends in every block, a tail of one element excepted."""
    bits = getattr(subject.spec, "bits", 8)
    codes = rng_of("grid", subject, numel).integers(0, 2**bits, numel)
    size = max(2, subject.granule_numel)
    codes[0::size], codes[1::size] = 0, 2**bits - 1
    return np.ldexp(codes - 2.0 ** (bits - 1), exponent).astype(np.float32)


def _expect_exact(subject: Subject, x: Floats, what: str) -> None:
    (found,) = Batch(subject.compressor, [x]).round_trip()
    assert (found == x).all(), f"{what}, {len(x)} elements: off by {np.abs(found - x).max()}"


def check_contraction(subject: Subject) -> None:
    """The squared error stays below `contraction` times the squared norm, on the worst inputs too."""
    factor = subject.compressor.guarantees.contraction
    assert factor is not None
    for name, x in _hard_inputs(subject):
        (found,) = Batch(subject.compressor, [x]).round_trip()
        error = float(np.sum(np.square(found.astype(np.float64) - x)))
        norm = float(np.sum(np.square(x.astype(np.float64))))
        # Steps below 2**-110 and bfloat16 subnormals are absolute: they floor the error.
        floor = 0.0 if factor == 0 else len(x) * 2.0**-220
        assert error <= factor * norm + floor, f"{name}: {error} against {factor} times {norm}"


def _hard_inputs(subject: Subject) -> list[tuple[str, Floats]]:
    patterns = [name for name in PATTERNS if name != "huge"]
    size = subject.granule_numel
    inputs = [(name, gradient(name, 2 * size + 33, seed=subject)) for name in patterns]
    # Between two levels and next to zero, with a range of twice the largest element.
    ends = np.zeros(max(2, size), np.float32)
    ends[:2] = -1, 1
    step = subject.family.step(subject.spec, ends)
    for level in (-0.5, 0.0, 0.5):
        middle = ends.copy()
        middle[2:] = level * step[2:]
        inputs.append((f"all at {level} steps from the middle", middle))
    return inputs
