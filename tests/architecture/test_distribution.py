"""What people install: a small public surface, in a wheel that fits every machine."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import cgx
from tests.architecture.sources import FILES, PACKAGE, ROOT


def test_public_names_are_few_and_resolve() -> None:
    assert len(cgx.__all__) <= 20
    assert len(set(cgx.__all__)) == len(cgx.__all__)
    for name in cgx.__all__:
        assert getattr(cgx, name) is not None
    assert set(cgx.__all__) <= set(dir(cgx))


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        cgx.no_such_name  # noqa: B018


def test_version_is_the_distribution_s() -> None:
    assert importlib.metadata.version("cgx") == cgx.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, without the network and without traces in the tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--quiet", "--wheel-dir", copy / "dist", copy),
        ],
        check=True,
        timeout=100,
    )
    (built,) = (copy / "dist").iterdir()
    return built


def test_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name == f"cgx-{cgx.__version__}-py3-none-any.whl"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    assert package >= {path.relative_to(PACKAGE.parent).as_posix() for path in FILES}
    assert "cgx/py.typed" in package
    assert all(name.startswith("cgx/") for name in package)
    assert not [name for name in package if name.endswith((".so", ".pyd", ".c", ".cpp", ".cu"))]


def test_wheel_metadata(wheel: Path) -> None:
    metadata = _read(wheel, "METADATA")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"demo", "frameworks", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "cgx = cgx.cli:main" in _text(wheel, "entry_points.txt")


def _read(wheel: Path, name: str) -> Message:
    return Parser().parsestr(_text(wheel, name))


def _text(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"cgx-{cgx.__version__}.dist-info/{name}").decode()
