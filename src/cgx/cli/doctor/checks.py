"""What `cgx doctor` looks at: each check finds something out and says what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from cgx.cli.doctor import conformance
from cgx.cli.doctor.network import VARIABLE, find_gloo_interface
from cgx.core.env import codec_threads
from cgx.testbed import refusal

_PACKAGES = ("numpy", "numba", "torch")


@final
@dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
        check: What was looked at.
        ok: Whether it is well.
        found: What was found.
        remedy: What to do where it is not well; empty where it is.
        needed: Whether cgx cannot work unless it is well.
    """

    check: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True

    def to_json(self) -> str:
        """Writes it as one line, without the newline."""
        return json.dumps(asdict(self))


def check_python() -> Finding:
    """The interpreter and the system."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    return Finding("python", True, found)


def check_packages() -> Finding:
    """The versions of what cgx stands on."""
    versions = {}
    for name in ("cgx", *_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if missing := [name for name in _PACKAGES if versions[name] == "not installed"]:
        return Finding("packages", False, found, f"pip install {' '.join(missing)}")
    return Finding("packages", True, found)


def check_cpu() -> Finding:
    """The processor, and how many of its cores this process may use."""
    model = platform.processor() or platform.machine()
    table = Path("/proc/cpuinfo")
    if table.exists():
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cpu", True, f"{model}, {usable} cores usable of {os.cpu_count()}")


def check_gloo() -> Finding:
    """Whether this torch can run a process group at all."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        threads = torch.get_num_threads()
        return Finding("torch.distributed", True, f"Gloo available, {threads} threads")
    return Finding(
        "torch.distributed",
        False,
        "this torch was built without Gloo",
        "Install a torch from the official wheels.",
    )


def check_cpu_kernels() -> Finding:
    """The Numba kernels, beside the NumPy oracle."""
    start = time.perf_counter()
    cases = conformance.compare_kernels()
    seconds, threads = time.perf_counter() - start, codec_threads()
    found = (
        f"Numba kernels loaded, {threads} thread{'s' if threads > 1 else ''}; {cases} results "
        f"byte-equal to the NumPy oracle in {seconds:.1f} s"
    )
    return Finding("kernels: CPU", True, found)


def check_reduction() -> Finding:
    """A compressed reduction between two ranks of this process."""
    error = conformance.reduce_between_threads()
    found = f"2 ranks end bit-identical; uniform:4 loses {error:.1%} of the mean's energy"
    return Finding("reduction", True, found)


def check_cuda_kernels() -> Finding:
    """The kernels for gradients on a GPU."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Finding(
        "kernels: CUDA",
        False,
        f"not loaded: this version of cgx has none; torch sees {device or 'no CUDA device'}",
        "Needed only for gradients on a GPU: train with those without cgx until it has them.",
        needed=False,
    )


def check_interface() -> Finding:
    """The network interface of Gloo."""
    interface = find_gloo_interface()
    if interface.name is None:
        return Finding(
            "network",
            False,
            f"{interface.reason}, which is no interface of this machine",
            f"Set {VARIABLE} to a name that `ip link` shows, or unset it.",
        )
    if interface.is_loopback:
        return Finding(
            "network",
            False,
            f"Gloo will use {interface.name} ({interface.reason}): no other machine can be reached",
            f"For training on several machines, set {VARIABLE} to the interface they share.",
            needed=False,
        )
    return Finding("network", True, f"Gloo will use {interface.name} ({interface.reason})")


def check_emulated_hosts() -> Finding:
    """Whether `cgx demo` can measure, or has to model, its links."""
    why_not = refusal()
    if why_not is None:
        return Finding("emulated hosts", True, "network namespaces with limited links work")
    return Finding(
        "emulated hosts",
        False,
        why_not,
        "Only `cgx demo` and `cgx bench` want them; without, they model the link and say so.",
        needed=False,
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_cpu,
    check_gloo,
    check_cpu_kernels,
    check_cuda_kernels,
    check_reduction,
    check_interface,
    check_emulated_hosts,
)


def diagnose(check: Callable[[], Finding]) -> Finding:
    """Runs a check; one that fails in a way it did not foresee is a finding too."""
    try:
        return check()
    except Exception as error:  # a doctor reports what breaks, and goes on
        name = check.__name__.removeprefix("check_").replace("_", " ")
        message = f"{type(error).__name__}: {error}"
        return Finding(name, False, message, "Report this, please, with all lines of this table.")
