"""How many threads a codec call uses is the user's choice, or a fair share of the machine."""

from __future__ import annotations

import os

import pytest

from cgx.core.env import codec_threads
from cgx.errors import SpecError


@pytest.mark.parametrize("count", ["1", "3", "64"])
def test_the_user_chooses(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv("CGX_THREADS", count)
    assert codec_threads() == int(count)


@pytest.mark.parametrize("text", ["0", "-1", "", "two", "1.5", " "])
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CGX_THREADS", text)
    with pytest.raises(SpecError, match="CGX_THREADS must be a positive whole number"):
        codec_threads()


@pytest.mark.parametrize(
    ("cores", "processes", "threads"),
    [(1, "1", 1), (2, "1", 2), (8, "1", 4), (8, "4", 2), (2, "8", 1), (8, "zero", 4), (8, "0", 4)],
)
def test_processes_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: str, threads: int
) -> None:
    monkeypatch.delenv("CGX_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert codec_threads() == threads
