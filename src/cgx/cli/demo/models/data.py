"""Real data that every machine already has: Python's own sources, and scikit-learn's digits.

A batch is a pure function of `(seed, rank, step)`. Two runs with one seed therefore see the same
data in the same order, which is what makes their final losses comparable seed by seed.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]

_HELD_OUT_EVERY = 10  # one file (or one image) in ten is never trained on


def generator(seed: int, rank: int, step: int) -> np.random.Generator:
    """Returns the random generator of one batch."""
    return np.random.default_rng((seed, rank, step))


@cache
def standard_library() -> tuple[Bytes, Bytes]:
    """Returns Python's top-level standard library modules as (training, held-out) bytes.

    Whole files are held out, so that the validation text was never seen. Some 4 MB in all; the
    text depends on the version of Python, not on the machine.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    held_out = texts[::_HELD_OUT_EVERY]
    training = [text for index, text in enumerate(texts) if index % _HELD_OUT_EVERY]
    return np.concatenate(training), np.concatenate(held_out)


def windows(text: Bytes, starts: npt.NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    """Cuts `(inputs, targets)`, both int64 of shape (len(starts), length), out of a text.

    The target of a byte is the byte after it.
    """
    rows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns scikit-learn's digits: training images and labels, held-out images and labels.

    Images are fp32 of shape (n, 1, 8, 8) in 0..1, labels int64 of shape (n,); n is 1617 to train
    on, 180 held out.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy((bunch.images / 16.0).astype(np.float32)[:, None])
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    held_out = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]
