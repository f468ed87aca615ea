"""Random bits without a generator: a hash of who, what and when, so that any rank can repeat any other's.

A parameter's key mixes the seed, its name and how many times it was reduced. A payload adds its stream, the phase and
the sending rank. Kernels split the mixed 64 bits in two words and hash them with the element's index.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

SCATTER, GATHER = 0, 1  # phases one and two
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bijective full mix of 64-bit words: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * _MULTIPLY_1
        z = (z ^ (z >> np.uint64(27))) * _MULTIPLY_2
    return z ^ (z >> np.uint64(31))


def name_hash(name: str) -> int:
    """64 bits that identify a parameter on every rank and machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def parameter_keys(
    seed: int, name_hashes: NDArray[np.uint64], reduction_indices: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One key per parameter for one reduction.

    Shapes:
        All arrays are (parameters,), dtype uint64.
    """
    start = mix64(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN)
    with np.errstate(over="ignore"):
        return mix64(mix64(start ^ name_hashes) + reduction_indices * _GOLDEN)


def stream(phase: int, sender_rank: int) -> int:
    """The part of a key that separates payloads: ``phase`` is SCATTER, GATHER or a layout's LOCAL."""
    return phase << 32 | sender_rank


def payload_keys(keys: NDArray[np.uint64], stream: int) -> NDArray[np.uint64]:
    """Keys of the payload ``stream`` for each parameter key; the kernels do the same inside."""
    with np.errstate(over="ignore"):
        return mix64(keys + np.uint64(stream + 1) * _GOLDEN)
