"""Keys are the same on every machine, and differ wherever anything about a payload does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cgx.core.random import (
    GATHER,
    SCATTER,
    mix64,
    name_hash,
    parameter_keys,
    payload_keys,
    stream,
)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        # First outputs of SplitMix64 seeded with 0 and 1234567: its state is a multiple of the golden
        # ratio away from the seed, its output the mix of that.
        (0x9E3779B97F4A7C15, 0xE220A8397B1DCDAF),
        (0x3C6EF372FE94F82A, 0x6E789E6AA1B965F4),
        (1234567 + 0x9E3779B97F4A7C15, 6457827717110365317),
        (0, 0),
    ],
)
def test_mix_is_splitmix64(state: int, word: int) -> None:
    assert int(mix64(np.array([state], np.uint64))[0]) == word


def test_pinned_keys() -> None:
    """Keys are part of the wire format."""
    assert name_hash("layer.weight") == 0xFB926D0D7D46D9AB
    keys = parameter_keys(0, np.array([name_hash("layer.weight")], np.uint64), np.zeros(1, np.uint64))
    assert int(keys[0]) == 0x274E60378AE17333
    assert int(payload_keys(keys, stream(SCATTER, 1))[0]) == 0xCA09CD97E3015E23


def test_names_beyond_ascii_hash_as_utf8() -> None:
    assert name_hash("schicht.größe") != name_hash("schicht.grosse")


def test_every_ingredient_changes_the_key() -> None:
    names = np.array([name_hash(f"p{i}") for i in range(5)], np.uint64)
    found = [
        payload_keys(parameter_keys(seed, names, np.full(5, index, np.uint64)), stream(phase, rank))
        for seed, index, phase, rank in itertools.product((0, 1, -1, 2**63), range(4), (SCATTER, GATHER), range(4))
    ]
    assert len(np.unique(np.concatenate(found))) == 4 * 4 * 2 * 4 * 5


def test_seeds_are_taken_modulo_64_bits() -> None:
    one, index = np.array([1], np.uint64), np.zeros(1, np.uint64)
    assert parameter_keys(-1, one, index) == parameter_keys(2**64 - 1, one, index)
    assert parameter_keys(2**64 + 5, one, index) == parameter_keys(5, one, index)


def test_streams_of_phases_never_meet() -> None:
    ranks = range(0, 100_000, 777)
    assert not {stream(SCATTER, r) for r in ranks} & {stream(GATHER, r) for r in ranks}


def test_keys_of_consecutive_reductions_share_half_their_bits() -> None:
    """A full mix: each of 64 bits flips with probability one half (5 standard deviations)."""
    names = np.full(4096, name_hash("w"), np.uint64)
    keys = parameter_keys(0, names, np.arange(4096, dtype=np.uint64))
    flipped = np.unpackbits((keys[1:] ^ keys[:-1]).view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(flipped - 0.5).max() < 5 * 0.5 / np.sqrt(4095)
