"""What a user sees while training: spans in a trace, numbers for a logger, and nothing on the screen."""

from __future__ import annotations

import csv
import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import cgx
from cgx.telemetry.summary import Auto, Report
from tests.harness import run_processes
from tests.integration.training import SMALL, step, wrapped


def profiled(rank: int) -> dict[str, int]:
    """Return how often each span of ours is in a trace of two steps, after one that was not traced."""
    model = wrapped(**SMALL)
    cgx.compress(model)
    step(model, rank, 0)
    seen: dict[str, int] = {}
    everything = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as trace:
        step(model, rank, 1)
        step(model, rank, 2)
    for event in trace.key_averages():
        if event.key.startswith("cgx::"):
            seen[event.key] = event.count
    return seen


def test_a_trace_of_all_threads_names_encoding_reducing_decoding_and_waiting() -> None:
    for seen in run_processes(profiled, 2):
        assert set(seen) == {"cgx::encode", "cgx::reduce", "cgx::decode", "cgx::wait"}
        assert seen["cgx::wait"] >= 4  # one a bucket
        assert seen["cgx::encode"] == seen["cgx::decode"]  # one a piece


def profiled_by_default(rank: int) -> set[str]:
    model = wrapped(**SMALL)
    cgx.compress(model)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model, rank, 0)
    return {event.key for event in trace.key_averages()}


def test_an_ordinary_trace_shows_how_long_the_training_thread_waited() -> None:
    for seen in run_processes(profiled_by_default, 2):
        assert "cgx::wait" in seen


def logged(rank: int) -> None:
    model = wrapped(**SMALL)
    handle = cgx.compress(model, "uniform:4")
    rows = []
    for number in range(3):
        step(model, rank, number)
        rows.append(handle.report().scalars())
    report = handle.report()
    last = rows[-1]
    assert last["cgx/wire_nbytes"] == report.wire_nbytes > 0
    assert last["cgx/ratio"] == report.ratio > 1
    assert all(type(value) is float for row in rows for value in row.values())
    assert rows[0]["cgx/reductions"] < last["cgx/reductions"]
    assert "cgx/bits" not in last  # a person chose


def test_scalars_are_the_numbers_of_the_report() -> None:
    run_processes(logged, 2)


@pytest.mark.parametrize(("choice", "bits"), [("off", 32), ("bf16", 16), ("uniform:8", 8), ("uniform:4+bf16", 4)])
def test_scalars_say_what_auto_has_in_use(choice: str, bits: int) -> None:
    auto = Auto(choice, True, "", {}, {}, {}, {}, ())
    scalars = Report(2, 0, 0, 0, 0, 0.0, {}, None, auto).scalars()
    assert (scalars["cgx/bits"], scalars["cgx/is_settled"]) == (bits, 1)


def test_scalars_make_the_rows_of_a_csv_file(tmp_path: Path) -> None:
    """The recipe of docs/visibility.md."""
    reports = [Report(2, n, 4096 * n, 4096 * n, 512 * n, 0.5, {}, None) for n in (1, 2)]
    with (tmp_path / "cgx.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *reports[0].scalars()])
        writer.writeheader()
        for number, report in enumerate(reports):
            writer.writerow({"step": number, **report.scalars()})
    with (tmp_path / "cgx.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cgx/wire_nbytes"] for row in rows] == ["512.0", "1024.0"]


def quiet(rank: int, how: str) -> tuple[str, list[str]]:
    """Return what went to the screen and what was logged at INFO or above."""
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger = logging.getLogger("cgx")
    logger.addHandler(Listener())
    logger.setLevel(logging.INFO)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        model = wrapped(**SMALL)
        cgx.compress(model, how)
        for number in range(3):
            step(model, rank, number)
    return out.getvalue() + err.getvalue(), records


def test_training_writes_nothing_on_the_screen() -> None:
    for screen, records in run_processes(quiet, 2, "uniform:4"):
        assert screen == ""
        assert records == []
