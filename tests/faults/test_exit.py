"""Programs end by themselves, with the right status and the right last words, whatever their session is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.faults.jobs import VICTIM

ROOT = Path(__file__).parents[2]
WORLD = 2
LIMIT_SECONDS = 60.0


def play(scenario: str) -> list[tuple[int, str]]:
    """Return each rank's exit status and what it wrote to its standard error."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(WORLD)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.exits", scenario, str(rank), str(WORLD), str(store.port)],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, told, strict=True)]


@pytest.mark.parametrize("scenario", ["tidy", "untidy"])
def test_a_job_that_went_well_ends_well(scenario: str) -> None:
    for status, text in play(scenario):
        assert status == 0, text
        assert "Traceback" not in text


def test_a_survivor_that_lets_the_error_out_ends_with_it() -> None:
    outcomes = play("bereaved")
    assert outcomes.pop(VICTIM)[0] == -signal.SIGKILL
    for status, text in outcomes:
        assert status == 1, text
        assert "cgx.errors.PeerLostError: bucket " in text.strip().splitlines()[-1]


def test_a_survivor_that_catches_the_error_may_leave_in_good_order() -> None:
    outcomes = play("bereaved_but_tidy")
    assert outcomes.pop(VICTIM)[0] == -signal.SIGKILL
    for status, text in outcomes:
        assert status == 0, text


def test_a_rank_that_raises_ends_with_its_own_error_and_the_others_with_ours() -> None:
    outcomes = play("failing")
    status, text = outcomes.pop(VICTIM)
    assert status == 1
    assert "ZeroDivisionError: on purpose" in text
    for status, text in outcomes:
        assert status == 1, text
        assert "cgx.errors.PeerLostError: bucket " in text
