"""States beside checkpoints: other numbers of ranks, files left from before, broken files, files of another save."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import cgx
from cgx.adapters.files import load_from_beside, remove_beside, save_beside
from tests.harness import run_processes
from tests.integration.training import SMALL, step, wrapped


def path(folder: Path, rank: int) -> Path:
    return folder / "sub" / f"cgx-{rank}.pt"


def compressed(rank: int, options: dict[str, Any], steps: int = 1) -> Any:
    """Return a model, which must live as long as its handle is used, and the handle."""
    model = wrapped(**SMALL)
    handle = cgx.compress(model, "uniform:2", **options)
    for number in range(steps):
        step(model, rank, number)
    return model, handle


def saved(rank: int, folder: Path, options: dict[str, Any]) -> None:
    _model, handle = compressed(rank, options)
    save_beside(handle, partial(path, folder), step=7)


def loaded(rank: int, folder: Path, options: dict[str, Any], at: int = 7) -> Any:
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cgx").addHandler(listener)
    _model, handle = compressed(rank, options, steps=2)
    assert set(handle.state_dict()["reduction_index"].values()) == {2}
    try:
        load_from_beside(handle, partial(path, folder), step=at, hint=" (a hint)")
    except cgx.SpecError as error:
        return str(error)
    residual = {name: tensor.numpy() for name, tensor in handle.state_dict()["residual"].items()}
    return told, residual, handle.state_dict()["reduction_index"]


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}], ids=str)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3)])
def test_states_are_found_by_as_many_ranks_or_others(
    tmp_path: Path, options: dict[str, Any], before: int, after: int
) -> None:
    run_processes(saved, before, tmp_path, options)
    for told, residual, counts in run_processes(loaded, after, tmp_path, options):
        assert told == []
        assert set(counts.values()) == {1}
        assert bool(residual) == bool(options)


def test_without_residuals_the_file_of_one_rank_will_do(tmp_path: Path) -> None:
    run_processes(saved, 2, tmp_path, {})
    path(tmp_path, 1).unlink()
    for told, _, counts in run_processes(loaded, 3, tmp_path, {}):
        assert told == []
        assert set(counts.values()) == {1}


def test_with_residuals_a_missing_file_is_an_error(tmp_path: Path) -> None:
    run_processes(saved, 2, tmp_path, {"error_feedback": True})
    path(tmp_path, 1).unlink()
    first, second = run_processes(loaded, 2, tmp_path, {"error_feedback": True})
    assert first[0] == []
    assert "cgx-1.pt is missing" in second


def test_files_of_an_earlier_run_with_more_ranks_go(tmp_path: Path) -> None:
    options = {"error_feedback": True}
    run_processes(saved, 4, tmp_path, options)
    run_processes(saved, 2, tmp_path, options)
    assert sorted(file.name for file in (tmp_path / "sub").iterdir()) == ["cgx-0.pt", "cgx-1.pt"]


def test_a_file_of_another_save_is_an_error(tmp_path: Path) -> None:
    run_processes(saved, 2, tmp_path, {})
    for told in run_processes(loaded, 2, tmp_path, {}, 8):
        assert "saved at step 7, the checkpoint beside it at step 8" in told


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path(tmp_path, 0).parent.mkdir()
    for rank in range(2):
        path(tmp_path, rank).write_bytes(content)
    for rank, told in enumerate(run_processes(loaded, 2, tmp_path, {})):
        assert f"cgx-{rank}.pt holds no state of cgx that can be read" in told


def test_no_file_is_no_error(tmp_path: Path) -> None:
    (first, *_), (second, *_) = run_processes(loaded, 2, tmp_path, {})
    assert "made without cgx" in first[0]
    assert first[0].endswith("(a hint)")
    assert second == []


def removing(rank: int, folder: Path) -> None:
    saved(rank, folder, {})
    dist.barrier()
    remove_beside(partial(path, folder))
    remove_beside(partial(path, folder))


def test_each_rank_removes_its_own(tmp_path: Path) -> None:
    run_processes(removing, 2, tmp_path)
    assert list((tmp_path / "sub").iterdir()) == []


def exact(rank: int, folder: Path) -> None:
    model = wrapped(**SMALL)
    handle = cgx.compress(model, "off")
    save_beside(handle, partial(path, folder))
    load_from_beside(handle, partial(path, folder))
    _other, handle = compressed(rank, {})
    load_from_beside(handle, partial(path, folder))


def test_where_nothing_was_compressed_nothing_is_loaded(tmp_path: Path) -> None:
    run_processes(exact, 2, tmp_path)
