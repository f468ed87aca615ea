"""The import contracts bite: a copy of the package with one wrong import breaks the right one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("core", "import cgx.torch", "layers"),
        ("compressors", "import cgx.transports", "layers"),
        ("brand_new", "", "layers"),
        ("core", "import numba", "numba"),
        ("collectives", "import torch", "torch"),
        ("brand_new", "import torch.distributed", "torch"),
        ("kernels", "import triton", "triton"),
        ("torch", "import rich", "demo"),
        ("policies", "import sklearn", "demo"),
        ("testbed", "import numpy", "testbed"),
    ],
)
def test_contract_refuses(module: str, line: str, contract: str, tmp_path: Path) -> None:
    copy = tmp_path / "src" / "cgx"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    directory = copy / module
    directory.mkdir(exist_ok=True)
    with (directory / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    report = _lint(tmp_path, contract)
    assert report.returncode == 1, report.stdout + report.stderr
    assert "0 kept, 1 broken" in report.stdout, report.stdout + report.stderr


def _lint(directory: Path, contract: str) -> subprocess.CompletedProcess[str]:
    # The script puts its working directory before the installed package.
    return subprocess.run(
        [
            Path(sys.executable).with_name("lint-imports"),
            ROOT / "pyproject.toml",
            f"--contract={contract}",
            "--no-cache",
            "--no-logo",
        ],
        cwd=directory / "src",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
