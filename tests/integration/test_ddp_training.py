"""Training through DDP and Gloo: it learns as stock DDP does, replicas agree, only the recipe decides bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import run_processes
from tests.integration.training import STOCK, Job, resume, train

SMALL = {"bucket_cap_mb": 0.02}


def digest_of(world_size: int, job: Job) -> str:
    """Return what all ranks end with, after checking that it is the same."""
    digests = {trained.digest for trained in run_processes(train, world_size, job)}
    assert len(digests) == 1, "replicas differ"
    return digests.pop()


@pytest.mark.parametrize(
    "options",
    [
        {"how": "uniform:4"},
        {"how": "uniform:8/rounding=nearest"},
        {"how": "bf16"},
        {"how": "uniform:2", "options": {"error_feedback": True}},
        {"how": {"0.weight": "uniform:2", "*": "uniform:6"}},
    ],
    ids=str,
)
def test_it_learns_as_stock_ddp_does(options: dict[str, Any]) -> None:
    job = Job(steps=80, **options)
    ours, stock = (
        np.mean([trained.losses[-20:] for trained in run_processes(train, 2, j)])
        for j in (job, replace(job, how=STOCK, options={}))
    )
    first = np.mean(run_processes(train, 2, Job(steps=1))[0].losses)
    assert stock < first / 2
    assert abs(ours - stock) < 0.1 * (first - stock)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_are_equal_after_200_steps(world_size: int) -> None:
    digest_of(world_size, Job(steps=200))


@pytest.mark.parametrize("how", ["uniform:3/rounding=stochastic", {"3.*": "bf16", "*": "uniform:2"}])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_replicas_are_equal_with_other_specs_and_small_buckets(how: Any, error_feedback: bool) -> None:
    digest_of(3, Job(steps=20, how=how, ddp=SMALL, options={"error_feedback": error_feedback}))


def test_two_runs_with_one_seed_are_equal_and_with_another_are_not() -> None:
    assert digest_of(2, Job()) == digest_of(2, Job())
    assert digest_of(2, Job(options={"seed": 1})) != digest_of(2, Job())


VARIANTS: dict[str, Job] = {
    "small buckets": Job(ddp=SMALL),
    "one bucket": Job(ddp={"bucket_cap_mb": 1000}),
    "bucket views": Job(ddp={"gradient_as_bucket_view": True}),
    "static graph": Job(ddp={"static_graph": True}),
    "unused parameters looked for": Job(ddp={"find_unused_parameters": True}),
    "small pieces": Job(options={"piece_nbytes": 1000}),
    "small pieces of small buckets": Job(ddp=SMALL, options={"piece_nbytes": 5000}),
    "modelled link": Job(options={"throttle_bit_s": 1e9}),
}


@pytest.fixture(scope="module")
def reference() -> dict[tuple[int, torch.dtype], str]:
    """Return digests of the plain job by world size and dtype."""
    return {
        (world_size, dtype): digest_of(world_size, Job(dtype=dtype))
        for world_size in (2, 3)
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_pieces_and_links_change_no_bit(variant: str, world_size: int, reference: dict) -> None:
    assert digest_of(world_size, VARIANTS[variant]) == reference[world_size, torch.float32]


def test_buckets_change_no_bit_of_bf16_gradients(reference: dict) -> None:
    assert digest_of(3, Job(ddp=SMALL, dtype=torch.bfloat16)) == reference[3, torch.bfloat16]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_a_restart_from_a_checkpoint_changes_no_bit(world_size: int, error_feedback: bool) -> None:
    # The new process meets DDP's buckets as they are before they are rebuilt.
    job = Job(ddp=SMALL, options={"error_feedback": error_feedback})
    whole = digest_of(world_size, job)
    saved = [trained.saved for trained in run_processes(train, world_size, replace(job, steps=3))]
    resumed = {trained.digest for trained in run_processes(resume, world_size, job, 3, saved)}
    assert resumed == {whole}


def test_compress_after_the_first_steps_is_a_start_from_there() -> None:
    # Counters start at zero where compression does: the same as a new job from a checkpoint of stock DDP.
    job = Job(ddp=SMALL, compress_at=3)
    saved = [trained.saved for trained in run_processes(train, 2, replace(job, steps=3, how=STOCK))]
    (begun, _) = run_processes(resume, 2, replace(job, compress_at=0), 3, saved)
    assert digest_of(2, job) == begun.digest


def test_gradients_accumulated_without_sync_are_reduced_once() -> None:
    job = Job(steps=30, accumulate=3)
    assert digest_of(2, job) == digest_of(2, replace(job, ddp={**SMALL, "gradient_as_bucket_view": True}))
    ours, stock = (run_processes(train, 2, j)[0].losses for j in (job, replace(job, how=STOCK)))
    assert abs(np.mean(ours[-10:]) - np.mean(stock[-10:])) < 0.1 * ours[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("ddp", [{}, SMALL, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_off_is_stock_bit_for_bit(world_size: int, ddp: dict[str, Any], dtype: torch.dtype) -> None:
    job = Job(steps=4, ddp=ddp, dtype=dtype)
    stock = digest_of(world_size, replace(job, how=STOCK))
    assert digest_of(world_size, replace(job, how="off")) == stock
    assert digest_of(world_size, replace(job, how="off", options={"throttle_bit_s": 1e9})) == stock
    assert digest_of(world_size, replace(job, how={"*": "off"})) == stock


def test_one_rank_is_left_alone() -> None:
    assert digest_of(1, Job()) == digest_of(1, Job(how=STOCK))
