"""The examples run as they are, and compress."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(tmp_path: Path, *argv: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_accelerate(tmp_path: Path) -> None:
    said = run(tmp_path, *_TORCHRUN, str(_EXAMPLES / "train_accelerate.py"))
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)x fewer bytes", said)]
    assert len(ratios) == 3
    assert min(ratios) > 6


def test_lightning(tmp_path: Path) -> None:
    said = run(tmp_path, str(_EXAMPLES / "train_lightning.py"))
    (ratio,) = re.findall(r"([\d.]+)x fewer bytes", said)
    assert float(ratio) > 6


def test_huggingface(tmp_path: Path) -> None:
    said = run(tmp_path, *_TORCHRUN, str(_EXAMPLES / "train_huggingface.py"))
    logged = re.findall(r"'cgx/ratio': '?([\d.]+)", said)
    assert logged, said
    assert min(float(ratio) for ratio in logged) > 6


@pytest.mark.parametrize("path", sorted(_EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_job_scripts_parse(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "export CGX=" in path.read_text()
