"""Measures of error against their definitions, and estimators against what they estimate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.policies.error import (
    FLOOR,
    extra_noise,
    lost_batch_share,
    preconditioned_error,
    relative_error,
    relative_error_by_block,
    relative_error_by_tensor,
    sampling_noise,
    squared_error,
    step_error,
)

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any)


def drawn(sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Return an error, a gradient whose tensors differ in size, and their extents."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(sizes).tolist()
    extents = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    exact = random.standard_normal(ends[-1])
    for i, extent in enumerate(extents):
        exact[extent] *= 3.0**i
    return random.standard_normal(ends[-1]), exact, extents


@given(SIZES, st.integers(0, 99), st.sampled_from([1, 32, 128]))
def test_each_measure_is_what_its_definition_says(sizes: list[int], seed: int, block: int) -> None:
    error, exact, extents = drawn(sizes, seed)
    assert squared_error(error) == pytest.approx(np.sum(error**2))
    assert relative_error(error, exact) == pytest.approx(np.sum(error**2) / np.sum(exact**2))
    least = FLOOR**2 * np.mean(exact**2)

    def in_units(runs: list[slice]) -> float:
        squares = [np.sum(error[r] ** 2) / max(np.mean(exact[r] ** 2), least) for r in runs if r.start < r.stop]
        return float(sum(squares)) / error.size

    blocks = [slice(at, min(at + block, e.stop)) for e in extents for at in range(e.start, e.stop, block)]
    assert relative_error_by_tensor(error, exact, extents) == pytest.approx(in_units(extents))
    assert relative_error_by_block(error, exact, extents, block_size=block) == pytest.approx(in_units(blocks))


@given(SIZES, st.integers(0, 99), st.integers(-20, 20))
def test_relative_measures_do_not_depend_on_the_unit_of_the_gradient(sizes: list[int], seed: int, power: int) -> None:
    error, exact, extents = drawn(sizes, seed)
    by = 2.0**power
    assert relative_error_by_tensor(error * by, exact * by, extents) == relative_error_by_tensor(error, exact, extents)
    found = relative_error_by_block(error * by, exact * by, extents)
    assert found == relative_error_by_block(error, exact, extents)
    v = exact**2
    assert step_error(error * by, v * by**2, eps=0) == step_error(error, v, eps=0)
    found = preconditioned_error(error * by, exact * by, v * by**2, eps=0)
    assert found == pytest.approx(preconditioned_error(error, exact, v, eps=0))


def test_measures_agree_where_all_scales_are_one() -> None:
    error, exact, extents = np.full(256, 0.1), np.tile([1.0, -1.0], 128), [slice(0, 100), slice(100, 256)]
    measures = [
        relative_error(error, exact),
        relative_error_by_tensor(error, exact, extents),
        relative_error_by_block(error, exact, extents),
        step_error(error, exact**2, eps=0.0),
        preconditioned_error(error, exact, exact**2, eps=0.0),
    ]
    assert measures == pytest.approx([0.01] * 5)


def test_noise_of_one_size_counts_more_where_gradients_are_small() -> None:
    exact = np.concatenate([np.full(128, 1.0), np.full(128, 0.01)])
    error = np.full(256, 0.01)
    halves = [slice(0, 128), slice(128, 256)]
    assert relative_error(error, exact) == pytest.approx(2e-4, rel=0.01)
    assert relative_error_by_tensor(error, exact, halves) == pytest.approx(0.5, rel=0.01)
    assert relative_error_by_tensor(error, exact, [slice(0, 256)]) == pytest.approx(2e-4, rel=0.01)
    assert relative_error_by_block(error, exact, [slice(0, 256)]) == pytest.approx(0.5, rel=0.01)
    # Adam's step is as wrong as it is large in the second half; that half does a hundredth of the work.
    assert step_error(error, exact**2, eps=0.0) == pytest.approx(0.5, rel=0.01)
    assert preconditioned_error(error, exact, exact**2, eps=0.0) == pytest.approx(0.01, rel=0.01)


def test_without_gradient_or_elements_there_is_an_answer() -> None:
    zeros, nothing = np.zeros(64), np.zeros(0)
    assert relative_error(zeros, zeros) == relative_error_by_tensor(zeros, zeros, [slice(0, 64)]) == 0
    assert relative_error(np.ones(64), zeros) == relative_error_by_block(np.ones(64), zeros, [slice(0, 64)]) == np.inf
    assert relative_error_by_tensor(nothing, nothing, [slice(0, 0)]) == squared_error(nothing) == 0
    assert extra_noise(0.0, 0.0) == 0
    assert extra_noise(1.0, 0.0) == np.inf
    assert lost_batch_share(np.inf) == 1


@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_the_estimate_of_noise_is_unbiased(ranks: int) -> None:
    # Elements of very different spread around a mean that is larger than all of it.
    random = np.random.default_rng(ranks)
    spread, truth, trials = 10.0 ** random.uniform(-2, 0, 50), random.standard_normal(50) * 5, 4000
    gradients = truth + spread * random.standard_normal((trials, ranks, 50))
    found = [sampling_noise(np.sum(g**2, 1), float(np.sum(g.mean(0) ** 2))) for g in gradients]
    wanted = np.sum(spread**2) / ranks
    assert np.mean(found) == pytest.approx(wanted, abs=4 * np.std(found) / np.sqrt(trials))
    # It is what the mean is off, too, and the control: the plain variance of N values is too small.
    off = np.square(gradients.mean(1) - truth).sum(1)
    assert np.mean(off) == pytest.approx(wanted, abs=4 * np.std(off) / np.sqrt(trials))
    biased = np.mean(found) * (ranks - 1) / ranks
    assert biased < wanted - 4 * np.std(found) / np.sqrt(trials)


@given(st.floats(0, 1e6))
def test_lost_batch_is_what_noise_says(extra: float) -> None:
    # Noise s / N of a batch and `extra` times more of it is the noise of a batch of (1 - lost) N.
    assert 1 / (1 - lost_batch_share(extra)) == pytest.approx(1 + extra)
