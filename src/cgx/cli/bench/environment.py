"""What a figure depends on beside the code: machine, versions, load and the exact command."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import cgx

_PACKAGES = ("numpy", "numba", "torch", "transformers")


@final
@dataclass(frozen=True)
class Environment:
    """Where and how a benchmark ran.

    Attributes:
        command: What to type to run it again.
        cpu: Model of the processor.
        cores: Cores this process may use.
        load: Mean number of runnable processes over the last minute; above the benchmark's own share, figures suffer.
        versions: Of cgx, Python and the packages below.
    """

    command: str
    cpu: str
    cores: int
    load: float
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.cpu}, {self.cores} cores, load {self.load:.1f}; {named}"


def describe(command: Sequence[str]) -> Environment:
    """Describes this machine, now."""
    return Environment(
        command=shlex.join(command),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        versions={"cgx": cgx.__version__, "python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _cpu() -> str:
    """Model name of the processor, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return named[0] if named else platform.machine()
