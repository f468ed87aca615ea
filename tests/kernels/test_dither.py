"""The dither hash is random enough for rounding: uniform, and uncorrelated where errors add up.

It is a short hash, not a generator for other uses. Thresholds are in standard deviations of the statistic under
perfect randomness; keys are fixed, so a run cannot fail by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, payload_keys, stream
from cgx.core.spec import Uniform
from cgx.kernels.reference import dither, uniform_encode

_TILES = 512  # 16384 elements: four stripes
_VARIANCE = (2.0**32 - 1) / 12
_SIGMAS = 6.0


def _keys(count: int) -> NDArray[np.uint64]:
    """Keys of one payload each, as training draws them: few parameters, many reductions."""
    names = np.array([name_hash(f"layer.{i % 4}") for i in range(count)], np.uint64)
    return payload_keys(parameter_keys(1, names, np.arange(count, dtype=np.uint64) // 4), stream(SCATTER, 1))


def _bits(keys: NDArray[np.uint64], tiles: int = _TILES, start: int = 0) -> NDArray[np.int64]:
    """16 bits per element, shape (keys, tiles, 32)."""
    return np.stack([dither(key, start, tiles) for key in keys]).astype(np.int64)


def _centred(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    return bits.astype(np.float64) - 32767.5


def _chi_square_sigmas(values: NDArray[np.int64], bins: int) -> float:
    """Deviation from a flat histogram; for many bins chi-square is nearly normal."""
    counts = np.bincount(values.reshape(-1), minlength=bins)
    expected = values.size / bins
    chi_square = float(np.square(counts - expected).sum() / expected)
    return (chi_square - (bins - 1)) / float(np.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize(("shift", "width"), [(0, 16), (8, 8), (0, 8), (12, 4), (4, 8)], ids=lambda n: str(n))
def test_bits_are_uniform(shift: int, width: int) -> None:
    bits = (_bits(_keys(128)) >> shift) & (2**width - 1)
    assert abs(_chi_square_sigmas(bits, 2**width)) < _SIGMAS
    for half in (bits[..., :16], bits[..., 16:]):
        assert abs(_chi_square_sigmas(half, 2**width)) < _SIGMAS


def test_bits_are_uniform_for_one_element_over_keys() -> None:
    """Unbiasedness is a mean over keys of a fixed element."""
    bits = _bits(_keys(1 << 14), tiles=1)
    for element in (0, 7, 16, 31):
        assert abs(_chi_square_sigmas(bits[:, 0, element] >> 8, 256)) < _SIGMAS


@pytest.mark.parametrize(("a", "b"), [(0, 16), (5, 21), (0, 1), (16, 17), (3, 30), (0, 8), (16, 24)], ids=str)
def test_two_elements_of_a_tile_are_independent(a: int, b: int) -> None:
    bits = _bits(_keys(256)) >> 12
    assert abs(_chi_square_sigmas(bits[..., a] * 16 + bits[..., b], 256)) < _SIGMAS


def _mean_autocorrelation(keys: NDArray[np.uint64], tiles: int) -> NDArray[np.float64]:
    """Autocorrelation at lags 1 up to half the length, averaged over keys."""
    numel = tiles * 32
    total = np.zeros(numel)
    for key in keys:
        spectrum = np.fft.rfft(_centred(_bits(key[None], tiles)).reshape(-1), 2 * numel)
        total += np.fft.irfft(np.abs(spectrum) ** 2)[:numel]
    lags = np.arange(1, numel // 2)
    return total[1 : numel // 2] / (_VARIANCE * (numel - lags) * len(keys))


def test_no_correlation_within_stripes() -> None:
    keys = _keys(64)
    found = _mean_autocorrelation(keys, _TILES)
    samples = _TILES * 32 - np.arange(1, len(found) + 1)
    assert (np.abs(found) * np.sqrt(samples * len(keys))).max() < _SIGMAS


def test_no_correlation_across_a_large_tensor() -> None:
    keys = _keys(4)
    found = _mean_autocorrelation(keys, 1 << 15)
    samples = (1 << 20) - np.arange(1, len(found) + 1)
    assert (np.abs(found) * np.sqrt(samples * len(keys))).max() < _SIGMAS


def test_sums_over_blocks_have_the_variance_of_independent_bits() -> None:
    bits = _centred(_bits(_keys(256))).reshape(-1)
    for numel in (32, 128, 1024, 4096):
        sums = bits.reshape(-1, numel).sum(axis=1)
        ratio = np.square(sums).mean() / (numel * _VARIANCE)
        assert abs(ratio - 1) < _SIGMAS * np.sqrt(2 / len(sums))


def test_streams_are_uncorrelated() -> None:
    """Ranks, phases, reductions and parameters: their errors must average out."""
    names = np.array([name_hash(n) for n in ("a", "b")], np.uint64)
    payloads = [
        payload_keys(parameter_keys(seed, names, np.full(2, index, np.uint64)), stream(phase, rank))
        for seed in (0, 1)
        for index in (0, 1)
        for phase in (SCATTER, GATHER)
        for rank in range(4)
    ]
    keys = np.concatenate(payloads)
    assert len(np.unique(keys)) == 64
    bits = _centred(_bits(keys)).reshape(len(keys), -1)
    matrix = np.corrcoef(bits) - np.eye(len(keys))
    assert np.abs(matrix).max() * np.sqrt(bits.shape[1]) < _SIGMAS
    spectra = np.fft.rfft(bits[:12])
    for i in range(12):
        for j in range(i):
            at_all_lags = np.fft.irfft(spectra[i] * spectra[j].conj()) / _VARIANCE
            assert np.abs(at_all_lags).max() / np.sqrt(bits.shape[1]) < _SIGMAS


def _on_steps_of_one(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Values in [0, 15] as blocks of 128 that hold both ends, so that a 4-bit step is exactly one."""
    x = values.astype(np.float32).reshape(-1, 128)
    x[:, 0], x[:, 1] = 0, 15
    return x.reshape(-1)


_SHAPES = {
    "ramp": np.linspace(0, 15, 1 << 15),
    "wave": 7.5 + 7 * np.sin(np.arange(1 << 15) / 50),
    "constant": np.full(1 << 15, 6.25),
    "halfway": np.full(1 << 15, 3.5),
    "noise": np.random.default_rng(0).normal(7.5, 0.3, 1 << 15),
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_subtracting_dither_leaves_uniform_noise_independent_of_the_input(shape: str) -> None:
    spec = Uniform(4, 128, "dithered", "bf16")
    x = _on_steps_of_one(_SHAPES[shape])
    keys = _keys(8)
    errors = np.stack([uniform_encode(x, spec, key, 0)[1] - x for key in keys]).astype(np.float64)
    count = errors.size
    assert np.abs(errors).max() <= 0.5 + 2.0**-16
    assert abs(errors.mean()) < _SIGMAS * np.sqrt(1 / 12 / count)
    assert abs(np.square(errors).mean() * 12 - 1) < _SIGMAS * np.sqrt(0.8 / count)
    levels = np.clip((errors + 0.5) * 256, 0, 255).astype(np.int64)
    assert abs(_chi_square_sigmas(levels, 256)) < _SIGMAS
    for function in (x, np.sin(2 * np.pi * x), np.cos(2 * np.pi * x)):
        centred = function - function.mean(dtype=np.float64)
        size = np.sqrt(np.square(centred).sum() * len(keys) / 12)
        assert abs((errors * centred).sum()) <= _SIGMAS * size
    # Errors of different senders average out: the mean over senders has 1/8 of the variance.
    ratio = np.square(errors.mean(axis=0)).mean() * 12 * len(keys)
    assert abs(ratio - 1) < _SIGMAS * np.sqrt(2 / len(x))
