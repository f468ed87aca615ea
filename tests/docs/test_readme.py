"""What the README shows is run: its script under torchrun, its commands by name, its specs by the parser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cgx.core.plan import to_specs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.timeout(240)
def test_the_script_trains_under_torchrun_as_shown(tmp_path: Path) -> None:
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script)
    (shown,) = [command for command in commands() if command.startswith("torchrun")]
    arguments = shown.split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fewer bytes" in done.stdout


def test_make_targets_exist() -> None:
    shown = [command.split()[1] for command in commands() if command.startswith("make ")]
    assert sorted(shown) == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in shown:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("cgx ")])
def test_commands_take_the_options_shown(command: str) -> None:
    words = command.split()[1:]
    names = [word for word in words if not word.startswith("-")]
    subcommand = names[:2] if names[0] == "bench" else names[:1]
    done = subprocess.run(
        [sys.executable, "-c", "from cgx.cli import main; main()", *subcommand, "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"TERM": "dumb", "COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    for option in [word for word in words if word.startswith("--")]:
        assert option in done.stdout


def test_specs_in_the_table_parse() -> None:
    rows = re.findall(r'^\| `"([^"]+)"`', README, re.MULTILINE)
    assert len(rows) >= 5
    for text in set(rows) - {"auto"}:
        to_specs(text)
