"""Doors for scripts that do not call cgx: the variable ``CGX``, the backend's name, and ``cgx run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import hashlib, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group({backend!r})
torch.manual_seed(0)
layers = torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
{extra}
with torch.no_grad():
    if dist.get_rank() == 0:
        model(torch.ones(1, 128))  # a look at the untrained model, on one rank alone
for step in range(3):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()
count = torch.tensor([7, dist.get_rank()])
dist.all_reduce(count, op=dist.ReduceOp.MAX)
assert count.tolist() == [7, 1]
flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
digests = [None, None]
dist.all_gather_object(digests, digest)
assert digests[0] == digests[1]
if dist.get_rank() == 0:
    from cgx.torch.ddp import handle_of
    handle = handle_of(model)
    ratio = None if handle is None else handle.report().raw_nbytes / max(1, handle.report().wire_nbytes)
    print("RESULT", digest, ratio)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # stock DDP on Gloo aborts now and then while the interpreter ends
"""
_FP16 = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)
"""


def run(
    tmp_path: Path, how: str | None = None, backend: str = "gloo", extra: str = "", launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the script on two ranks, as a user would."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(backend=backend, extra=extra))
    environment = {key: value for key, value in os.environ.items() if key != "CGX"} | {"OMP_NUM_THREADS": "1"}
    if how is not None:
        environment["CGX"] = how
    start = launcher or (sys.executable, "-m", "torch.distributed.run")
    argv = [*start, "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100, check=False)


def result(done: subprocess.CompletedProcess[str]) -> tuple[str, float | None]:
    """The digest of the gradients, and raw bytes over bytes sent."""
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    _, digest, ratio = line.split()
    return digest, None if ratio == "None" else float(ratio)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest, ratio = result(run(tmp_path_factory.mktemp("stock")))
    assert ratio is None, "nothing asked for compression"
    return digest


def test_the_variable_compresses_an_unmodified_script(tmp_path: Path, stock: str) -> None:
    digest, ratio = result(run(tmp_path, "uniform:4"))
    assert digest != stock
    assert ratio is not None
    assert ratio > 6.5


def test_the_backend_compresses_with_one_word_changed(tmp_path: Path, stock: str) -> None:
    digest, ratio = result(run(tmp_path, "uniform:4", backend="cgx"))
    assert digest != stock
    assert ratio is not None
    assert ratio > 6.5


def test_the_backend_alone_is_auto_which_leaves_a_fast_link_exact(tmp_path: Path, stock: str) -> None:
    digest, _ = result(run(tmp_path, backend="cpu:cgx"))
    assert digest == stock


def test_off_and_a_hook_of_the_scripts_own_are_respected(tmp_path: Path, stock: str) -> None:
    assert result(run(tmp_path, "off", backend="cgx")) == (stock, None)
    _, ratio = result(run(tmp_path, "uniform:4", extra=_FP16))
    assert ratio is None


def test_a_typo_is_an_error_that_lists_the_valid_forms(tmp_path: Path) -> None:
    done = run(tmp_path, "unifrom:4")
    assert done.returncode != 0
    assert "unknown spec 'unifrom:4'; valid forms" in done.stderr


def test_the_launcher_is_the_variable(tmp_path: Path, stock: str) -> None:
    launcher = (sys.executable, "-m", "cgx.cli", "run", "--how", "uniform:4")
    digest, ratio = result(run(tmp_path, launcher=launcher))
    assert digest != stock
    assert ratio is not None


def test_an_unused_installation_costs_import_torch_nothing() -> None:
    code = (
        "import sys, threading, torch\n"
        "assert torch.distributed.is_backend_available('cgx')\n"
        "loaded = sorted(name for name in sys.modules if name.split('.')[0] in ('cgx', 'numba', 'llvmlite'))\n"
        "tiny = ['cgx', 'cgx.core', 'cgx.core.env', 'cgx.errors', 'cgx.torch', 'cgx.torch.autoload']\n"
        "assert loaded == tiny, loaded\n"
        "assert threading.active_count() == 1\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CGX"}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
