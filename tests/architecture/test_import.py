"""Importing cgx is cheap and leaves no trace; heavy libraries load where they are first needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE

HEAVY = ("torch", "numba", "jax", "triton")
TORCH_FREE = ("core", "errors", "telemetry", "testbed", "kernels", "compressors", "policies", "collectives")

_FOOTPRINT = """
import atexit, json, logging, os, pathlib, random, signal, sys, threading, warnings
import numpy

def footprint():
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "files": sorted(os.listdir()),
        "environment": dict(os.environ),
        "filters": repr(warnings.filters),
        "handlers": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "exit_callbacks": atexit._ncallbacks(),
        "log_handlers": repr(logging.root.handlers),
        "random": [repr(random.getstate()), repr(numpy.random.get_state())],
    }

before = footprint()
import cgx
after = footprint()
json.dump([before, after], sys.stdout)
"""

_EVERY_MODULE = """
import importlib, json, pkgutil, sys, threading
import cgx

names, absent = ["cgx"], []
for module in pkgutil.walk_packages(cgx.__path__, "cgx."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("jax", "triton"):
            raise
        absent.append(module.name)
    else:
        names.append(module.name)

from numba.core.dispatcher import Dispatcher
import torch
json.dump({
    "imported": names,
    "absent": absent,
    "threads": [thread.name for thread in threading.enumerate()],
    "compiled": [
        f"{name}.{attribute}"
        for name in names
        for attribute, value in vars(sys.modules[name]).items()
        if isinstance(value, Dispatcher) and value.signatures
    ],
    "cuda_initialised": torch.cuda.is_initialized(),
}, sys.stdout)
"""


def test_import_cgx_leaves_no_trace(tmp_path: Path) -> None:
    before, after = json.loads(_run(_FOOTPRINT, tmp_path))
    assert after == before


@pytest.mark.parametrize(
    "trace",
    [
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "os.open('file', os.O_CREAT)",
        "os.environ['LEFT'] = 'behind'",
        "random.random()",
        "warnings.simplefilter('ignore')",
    ],
)
def test_a_trace_would_be_seen(trace: str, tmp_path: Path) -> None:
    before, after = json.loads(_run(_FOOTPRINT.replace("import cgx", trace), tmp_path))
    assert after != before


def test_import_cgx_loads_nothing_heavy(tmp_path: Path) -> None:
    assert _heavy_after("import cgx", tmp_path) == []


@pytest.mark.parametrize("room", [name for name in TORCH_FREE if list(PACKAGE.glob(f"{name}*"))])
def test_import_room_without_torch(room: str, tmp_path: Path) -> None:
    assert "torch" not in _heavy_after(f"import cgx.{room}", tmp_path)


def test_public_name_loads_torch(tmp_path: Path) -> None:
    """The control of the two above: the detector sees torch where it must be loaded."""
    assert "torch" in _heavy_after("import cgx; cgx.compress", tmp_path)


def test_importing_every_module_starts_nothing(tmp_path: Path) -> None:
    seen = json.loads(_run(_EVERY_MODULE, tmp_path))
    assert "cgx.torch" in seen["imported"]
    assert seen["threads"] == ["MainThread"]
    assert seen["compiled"] == []
    assert not seen["cuda_initialised"]


def _heavy_after(statement: str, directory: Path) -> list[str]:
    shown = f"import json, sys; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    loaded: list[str] = json.loads(_run(f"{statement}\n{shown}", directory))
    return loaded


def _run(program: str, directory: Path) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout
