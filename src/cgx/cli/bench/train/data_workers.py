"""DataLoader workers that keep the processor busy, as real ones do that decode and augment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import final

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

_IMAGE_SHAPE = (256, 256, 3)


@final
class _NeverReady(IterableDataset[int]):
    """Prepares images until told to stop, and hands out none.

    The steps take the same batch every time, so they never wait for data and the workers never wait for them.
    """

    def __init__(self, stop: Event) -> None:
        self._stop, self._parent_pid = stop, os.getpid()

    def __iter__(self) -> Iterator[int]:
        image = np.random.default_rng(0).random(_IMAGE_SHAPE, np.float32)
        # A rank that was killed can tell nobody.
        while not self._stop.is_set() and os.getppid() == self._parent_pid:
            image = np.ascontiguousarray(np.flip(image, 1)) * np.float32(0.9) + np.float32(0.05)
        return iter(())


@contextmanager
def busy_workers(count: int) -> Iterator[None]:
    """Runs so many worker processes; none is fine. To be opened before this process has threads of its own."""
    if count == 0:
        yield
        return
    stop = multiprocessing.get_context().Event()
    loader = iter(DataLoader(_NeverReady(stop), batch_size=None, num_workers=count))
    try:
        yield
    finally:
        stop.set()
        for _ in loader:  # ends at once: all that the workers had to say is that there is nothing
            raise AssertionError("there is no data")
