"""`cgx demo` from end to end, with a few steps of each model."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cgx.testbed import refusal

KEYS = [
    "model",
    "how",
    "seed",
    "final_loss",
    "final_accuracy",
    "step_p50_s",
    "wire_nbytes_per_step",
    "ratio",
    "speedup",
    "replicas_identical",
    "measured",
]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
REFUSAL = refusal()
CGX = [sys.executable, "-c", "from cgx.cli import main; main()"]
# A user namespace of its own, in which no further network namespace may be made.
REFUSED = [
    *("unshare", "--user", "--map-root-user"),
    *("sh", "-c", 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh"),
]

Row = dict[str, object]


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


def rows(text: str) -> list[Row]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    """The rows that the demo printed, and the folder that it made."""
    folder = tmp_path_factory.mktemp("demo") / "made"
    options = ["--link=none", "--steps=1", "--json", f"--out={folder}"]
    done = run([*CGX, "demo", *options], folder.parent)
    assert done.returncode == 0, done.stderr
    return rows(done.stdout), folder


def test_prints_one_object_for_each_run(demonstration: tuple[list[Row], Path]) -> None:
    results, _ = demonstration
    assert [(row["model"], row["how"], row["seed"]) for row in results] == [
        ("gpt", "off", 0),
        ("gpt", "uniform:4", 0),
        ("convnet", "off", 0),
        ("convnet", "uniform:4", 0),
    ]
    assert all(list(row) == KEYS for row in results)


def test_sends_fewer_bytes_and_keeps_replicas_identical(
    demonstration: tuple[list[Row], Path],
) -> None:
    for row in demonstration[0]:
        assert row["replicas_identical"] is True
        assert row["measured"] is False, "without a limit there was no link to measure"
        ratio = row["ratio"]
        assert isinstance(ratio, float)
        assert ratio == 1.0 if row["how"] == "off" else ratio > 5.0


def test_writes_the_figure_and_the_results(demonstration: tuple[list[Row], Path]) -> None:
    results, folder = demonstration
    assert (folder / "loss-over-time.png").read_bytes().startswith(PNG_MAGIC)
    assert rows((folder / "results.jsonl").read_text(encoding="utf-8")) == results


def test_models_the_link_where_namespaces_are_refused(tmp_path: Path) -> None:
    options = ["--link=1gbit", "--steps=3", "--models=convnet", "--json"]
    done = run([*([] if REFUSAL else REFUSED), *CGX, "demo", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes on loopback with 1gbit links (modelled)" in done.stderr
    exact, compressed = rows(done.stdout)
    assert exact["measured"] is compressed["measured"] is False
    assert exact["replicas_identical"] is compressed["replicas_identical"] is True
    assert isinstance(compressed["ratio"], float)
    assert compressed["ratio"] > 5.0


def test_ctrl_c_stops_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*CGX, "demo", "--link=none", "--how=off", "--steps=100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "steps ..." not in (line := process.stdout.readline()):
            assert line, "the demo ended before it started a run"
        process.send_signal(signal.SIGINT)
        assert "Stopped" in process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--link=100", "not a link rate"),
        ("--how=uniform:9", "1 to 8"),
        ("--models=bert", "No model bert: have gpt, convnet"),
    ],
)
def test_refuses_with_one_sentence(option: str, said: str, tmp_path: Path) -> None:
    done = run([*CGX, "demo", option], tmp_path)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
