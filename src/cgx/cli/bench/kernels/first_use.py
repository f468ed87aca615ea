"""What the first use of a spec costs: in a process that must compile its kernels, and in one that finds them cached."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from cgx.compressors.base import OWN
from cgx.compressors.registry import compressor_for
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import single_row
from cgx.core.spec import Spec, parse_spec
from cgx.errors import CgxError

_NUMEL = 128
_PATIENCE_SECONDS = 300.0
# Numba is imported before the clock starts: its import costs the same whatever we compile with it.
_PROGRAM = """
import sys, time
import numba
start = time.perf_counter()
from cgx.cli.bench.kernels.first_use import use
use(sys.argv[1])
print(time.perf_counter() - start)
"""


@final
@dataclass(frozen=True)
class FirstUse:
    """Seconds from `import numba` to the end of a first compress, decompress and reduce of a small fp32 tensor.

    Attributes:
        op: `first_use`.
        spec: In full.
        cold_s: With an empty cache.
        warm_s: In the process after that.
    """

    op: str
    spec: str
    cold_s: float
    warm_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_first_use(spec: Spec) -> FirstUse:
    """Measures both in processes of their own, with a cache of their own.

    Raises:
        CgxError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="cgx-bench-") as cache:
        cold, warm = (_seconds(spec, cache) for _ in range(2))
    return FirstUse("first_use", str(spec), cold, warm)


def use(text: str) -> None:
    """Compresses, decompresses and reduces a small tensor with a spec."""
    codec = compressor_for(parse_spec(text))
    x = np.linspace(-1, 1, _NUMEL, dtype=np.float32)
    nbytes = codec.row_nbytes(_NUMEL, "fp32")
    table = single_row(_NUMEL, wire_nbytes=nbytes)
    keys = parameter_keys(0, np.array([name_hash("first use")], np.uint64), np.zeros(1, np.uint64))
    wires, wire_out = np.zeros(2 * nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    codec.compress(x, wires[nbytes:], table, keys, 1)
    codec.decompress(wires[nbytes:], np.empty_like(x), table, keys, 1)
    starts = np.array([0, nbytes], np.int64)
    codec.reduce(wires, starts, x, wire_out, table, table, keys, into=codec, senders=[OWN, 1], stream_out=0, scale=0.5)


def _seconds(spec: Spec, cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(spec)],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise CgxError(f"the first use of {spec} failed in a fresh process:\n{done.stderr}")
    return float(done.stdout)
