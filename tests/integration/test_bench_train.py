"""`cgx bench train`: it prints what it promises, stops when it should, and finds what is wrong."""

import json
import math
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cgx.cli.bench.train.checks import allowed_gradient_nmse, exact_mean, gradient_nmse
from cgx.cli.bench.train.data_workers import busy_workers
from cgx.cli.bench.train.hows import AUTO, FP16, OFF, parse_hows
from cgx.cli.bench.train.messages import COMPUTE, Assignment, Measured, Outcome, Track, from_line, to_line
from cgx.cli.bench.train.results import Place, Result, judge
from cgx.cli.bench.train.stopping import Goal, Interval, interval, is_enough
from cgx.cli.bench.train.workloads import WORKLOADS, find_workloads
from cgx.errors import SpecError
from cgx.testbed import refusal

KEYS = [
    *("model", "params", "hosts", "ranks_per_host", "threads_per_rank", "link"),
    *("batch", "accumulate", "data_workers", "how"),
    *("step_p50_s", "compute_p50_s", "baseline_p50_s", "speedup", "speedup16"),
    *("ratio_ci_low", "ratio_ci_high", "pass_never_slower", "pairs"),
    *("wire_nbytes_per_step", "exposed_comm_s", "wait_s_per_step", "cpu_s_per_step"),
    *("grad_nmse", "chosen", "decisions", "verified"),
]
SPEC, POWERSGD = "uniform:4", "powersgd:1"
REFUSAL = refusal()
CGX_COMMAND = [sys.executable, "-c", "from cgx.cli import main; main()", "bench", "train"]
# A user namespace of its own, in which no further network namespace may be made.
REFUSED = [
    *("unshare", "--user", "--map-root-user"),
    *("sh", "-c", 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh"),
]


def run(*arguments: str, within: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*(within or []), *CGX_COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


# The command.


def test_it_prints_a_verified_object_for_each_way(tmp_path: Path) -> None:
    link = "1gbit" if REFUSAL is None else "none"
    done = run(
        *("--model=mlp", f"--link={link}", f"--how={SPEC},{FP16},{POWERSGD},{AUTO}", "--accumulate=2"),
        *("--pairs=3", "--min-pairs=2", "--warm-up=6", "--steps-per-turn=2", "--json", f"--plot={tmp_path}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, environment = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["how"] for row in rows] == [OFF, SPEC, FP16, POWERSGD, AUTO]
    nmses = {}
    for row in rows:
        assert list(row) == KEYS
        assert row["verified"] is True
        assert (row["model"], row["params"], row["hosts"], row["accumulate"]) == ("mlp", 98_880, 2, 2)
        assert row["pairs"] in (2, 3)
        assert row["baseline_p50_s"] == rows[0]["step_p50_s"]
        assert row["speedup"] == pytest.approx(row["baseline_p50_s"] / row["step_p50_s"])
        assert row["speedup16"] == pytest.approx(rows[2]["step_p50_s"] / row["step_p50_s"])
        assert row["exposed_comm_s"] == pytest.approx(max(0, row["step_p50_s"] - row["compute_p50_s"]))
        assert (row["wait_s_per_step"] is None) == (row["how"] not in (SPEC, AUTO))
        assert (row["chosen"] is None) == (row["decisions"] is None) == (row["how"] != AUTO)
        nmses[row["how"]] = row["grad_nmse"]
    assert nmses[OFF] < 1e-11 < nmses[FP16] < 1e-5 < nmses[SPEC] < 0.05 < nmses[POWERSGD] < 1
    # 4.25 bits an element in each phase of cgx; two ranks' ring moves the gradient once.
    wire = {row["how"]: row["wire_nbytes_per_step"] for row in rows}
    assert wire[SPEC] == pytest.approx(98_880 * 4.25 / 8, rel=0.1)
    if REFUSAL is None:
        assert wire[OFF] == pytest.approx(4 * 98_880, rel=0.03)
        assert wire[FP16] == pytest.approx(2 * 98_880, rel=0.03)
    assert environment["op"] == "environment"
    assert environment["command"].startswith("cgx bench train --model=mlp")
    assert (tmp_path / "step-time.png").read_bytes().startswith(b"\x89PNG")


def test_a_link_that_cannot_be_made_is_refused() -> None:
    done = run("--model=mlp", "--link=1gbit", within=None if REFUSAL else REFUSED)
    assert done.returncode == 1
    assert "--link=none" in done.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model=nope", "have gpt-27m"),
        ("--how=uniform:9", "1 to 8"),
        ("--how=powersgd", "rank of the approximation"),
        ("--link=100", "not a link rate"),
        ("--link=,", "names no link"),
        ("--min-pairs=99", "more than --pairs"),
    ],
)
def test_it_refuses_with_one_sentence(option: str, said: str) -> None:
    done = run(option)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_baseline_comes_first_and_once() -> None:
    assert parse_hows(f"{SPEC},{OFF},{SPEC}, {AUTO}") == [OFF, SPEC, AUTO]
    assert parse_hows("") == [OFF]


# The models.


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_has_the_stated_parameters_and_eats_its_batches(name: str) -> None:
    (workload,) = find_workloads([name]).values()
    with torch.device("meta"):  # shapes only: nothing is computed
        model = workload.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == workload.params
    inputs, targets = workload.make_batch(torch.Generator().manual_seed(0), workload.batch)
    found = model(inputs.to("meta"))
    logits = found if isinstance(found, torch.Tensor) else found.logits
    assert logits.shape[:-1] == targets.shape
    assert int(targets.max()) < logits.shape[-1]
    assert sum(len(group["params"]) for group in workload.optimizer(model).param_groups) > 0


def test_no_model_is_no_model() -> None:
    with pytest.raises(SpecError, match="was named"):
        find_workloads([])


# When to stop. The quantiles of Student's t are from a table: 4.3027 for 3 pairs, 2.2622 for 10.


def test_interval_is_student_s() -> None:
    assert interval([2.0], [1.0]) == Interval(0.0, math.inf)
    three = interval([2.0, 2.0, 2.0 * math.e], [2.0 * math.e, 2.0, 2.0])  # logarithms -1, 0, 1
    assert math.log(three.high) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert three.low == pytest.approx(1 / three.high)
    ten = interval([0.5 * math.exp(0.01 * sign) for sign in [-1, 1] * 5], [1.0] * 10)
    spread = 2.2622 * 0.01 * math.sqrt(10 / 9) / math.sqrt(10)
    assert ten.low == pytest.approx(0.5 * math.exp(-spread), rel=1e-6)
    assert ten.high == pytest.approx(0.5 * math.exp(spread), rel=1e-6)
    assert ten.half_width == pytest.approx(math.exp(spread) - 1, rel=1e-4)


@pytest.mark.parametrize(
    ("found", "precise", "never_slower"),
    [
        pytest.param(Interval(0.0, math.inf), False, False, id="one pair"),
        pytest.param(Interval(0.5, 0.8), False, True, id="surely faster"),
        pytest.param(Interval(1.2, 1.5), False, True, id="surely slower"),
        pytest.param(Interval(0.9, 1.1), False, False, id="undecided"),
        pytest.param(Interval(1.02, 1.04), True, False, id="known, but to both sides of 1.03"),
        pytest.param(Interval(0.99, 1.01), True, True, id="known"),
    ],
)
def test_an_interval_settles(found: Interval, precise: bool, never_slower: bool) -> None:
    assert found.settles(Goal.PRECISE) is precise
    assert found.settles(Goal.NEVER_SLOWER) is never_slower


def test_enough_is_when_all_are_settled_within_the_bounds() -> None:
    narrow, wide = Interval(0.99, 1.01), Interval(0.5, 2.0)

    def enough(*intervals: Interval, pairs: int) -> bool:
        return is_enough(intervals, Goal.PRECISE, pairs=pairs, min_pairs=3, max_pairs=5)

    assert not enough(narrow, narrow, pairs=2)
    assert enough(narrow, narrow, pairs=3)
    assert not enough(narrow, wide, pairs=4)
    assert enough(narrow, wide, pairs=5)


# What makes a measurement verified.

PARAMS, PAYLOAD_NBYTES = 250_000, 133_000
PLACE = Place(hosts=2, ranks_per_host=1, link_bit_s=1e8)
ASSIGNMENT = Assignment(
    model="mlp",
    hows=(OFF, SPEC, FP16),
    batch=1,
    accumulate=1,
    steps_per_turn=1,
    warm_up=3,
    min_pairs=2,
    max_pairs=3,
    goal=Goal.PRECISE,
    data_workers=0,
    interface="eth0",
    timeout_seconds=1.0,
)


def honest_ranks() -> list[Measured]:
    """Two ranks whose measurements agree: steps of 100, 40 and 60 ms, 20 of them computing; rank 1 is the slower."""
    seconds = {COMPUTE: 0.020, OFF: 0.100, SPEC: 0.040, FP16: 0.060}
    counted = {COMPUTE: 200.0, OFF: 4.0 * PARAMS + 9_000, SPEC: PAYLOAD_NBYTES + 2_000.0, FP16: 2.0 * PARAMS}
    allowed = {OFF: 1e-11, SPEC: 0.02, FP16: 1e-6}
    return [
        Measured(
            rank=rank,
            threads=1,
            buffers_nbytes=0,
            tracks={
                name: Track(
                    seconds=[value + 0.001 * rank] * 3,
                    cpu_seconds=[value / 2] * 3,
                    counted_nbytes=[counted[name]] * 3,
                    payload_nbytes=[PAYLOAD_NBYTES] * 3 if name == SPEC else [],
                    wait_seconds=[0.01 + 0.01 * rank] * 3 if name == SPEC else [],
                    losses=[1.0] * 3,
                )
                for name, value in seconds.items()
            },
            outcomes={how: Outcome(how, allowed[how] / 2, allowed[how]) for how in ASSIGNMENT.hows},
        )
        for rank in range(2)
    ]


def test_measurements_survive_the_way_to_the_supervisor() -> None:
    (measured, _) = honest_ranks()
    assert from_line(to_line(measured)) == measured
    assert Assignment.from_json(ASSIGNMENT.to_json()) == ASSIGNMENT


def test_judge_takes_the_slowest_rank() -> None:
    judgement = judge(ASSIGNMENT, honest_ranks()[::-1], params=PARAMS, place=PLACE)
    assert not judgement.faults
    assert [field.name for field in fields(Result)] == KEYS
    off, spec, fp16 = judgement.results
    assert off.step_p50_s == pytest.approx(0.101)
    assert (off.ratio_ci_low, off.ratio_ci_high) == (1, 1)
    assert spec.compute_p50_s == pytest.approx(0.021)
    assert spec.exposed_comm_s == pytest.approx(0.020)
    assert spec.speedup == pytest.approx(0.101 / 0.041)
    assert spec.speedup16 == pytest.approx(0.061 / 0.041)
    assert spec.ratio_ci_low == pytest.approx(0.041 / 0.101)
    assert spec.wait_s_per_step == pytest.approx(0.02)
    assert spec.wire_nbytes_per_step == PAYLOAD_NBYTES + 2_000
    assert fp16.wait_s_per_step is None
    assert all(result.verified and result.pass_never_slower for result in judgement.results)


def test_surely_slower_does_not_pass() -> None:
    slow = [_with_track(rank, SPEC, seconds=[0.110, 0.111, 0.112]) for rank in honest_ranks()]
    results = judge(ASSIGNMENT, slow, params=PARAMS, place=PLACE).results
    assert [result.pass_never_slower for result in results] == [True, False, True]


def _with_track(rank: Measured, how: str, **entries: list[float]) -> Measured:
    return replace(rank, tracks={**rank.tracks, how: replace(rank.tracks[how], **entries)})


def _with_outcome(rank: Measured, how: str, **values: object) -> Measured:
    return replace(rank, outcomes={**rank.outcomes, how: replace(rank.outcomes[how], **values)})


ZERO, ONE = honest_ranks()


@pytest.mark.parametrize(
    ("ranks", "how", "said"),
    [
        pytest.param([ZERO, _with_outcome(ONE, FP16, digest="other")], FP16, "different weights", id="replicas"),
        pytest.param([_with_outcome(ZERO, SPEC, nmse=0.021), ONE], SPEC, "0.02 is the most", id="error"),
        pytest.param([_with_outcome(ZERO, FP16, nmse=math.nan), ONE], FP16, "error nan", id="NaN gradient"),
        pytest.param([ZERO, _with_track(ONE, OFF, losses=[1.0, math.nan])], OFF, "not finite", id="NaN loss"),
        pytest.param([ZERO, _with_track(ONE, OFF, counted_nbytes=[9e5] * 3)], OFF, "900000", id="too few bytes"),
        pytest.param([_with_track(ZERO, SPEC, counted_nbytes=[2e5] * 3), ONE], SPEC, "200000", id="too many bytes"),
    ],
)
def test_judge_finds(ranks: list[Measured], how: str, said: str) -> None:
    judgement = judge(ASSIGNMENT, ranks, params=PARAMS, place=PLACE)
    (fault,) = judgement.faults
    assert f"{how}: " in fault
    assert said in fault
    assert [result.how for result in judgement.results if not result.verified] == [how]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_allowed_error_holds_for_rounding_and_not_for_a_lost_parameter() -> None:
    generator = torch.Generator().manual_seed(0)
    local = {name: torch.randn(64, 64, generator=generator) * scale for name, scale in (("a", 1.0), ("b", 0.1))}
    exact = exact_mean(local)
    assert gradient_nmse(local, exact) == 0
    steps = {name: (part.max() - part.min()) / 15 for name, part in local.items()}
    rounded = {name: torch.round(part / steps[name]) * steps[name] for name, part in local.items()}
    halved = {name: part.half().float() for name, part in local.items()}
    allowed = {how: allowed_gradient_nmse(how, local, exact) for how in (OFF, SPEC, FP16, POWERSGD, AUTO)}
    assert allowed[POWERSGD] is None
    assert allowed[AUTO] == allowed[SPEC]
    assert 0 < gradient_nmse(rounded, exact) < allowed[SPEC] < gradient_nmse({**local, "a": local["b"]}, exact)
    assert allowed[OFF] < gradient_nmse(halved, exact) < allowed[FP16] < gradient_nmse(rounded, exact)


def test_data_workers_are_busy_and_end() -> None:
    others = set(multiprocessing.active_children())
    with busy_workers(1):
        (worker,) = set(multiprocessing.active_children()) - others
        stat = Path(f"/proc/{worker.pid}/stat")
        while int(stat.read_text().rpartition(")")[2].split()[11]) < 5:  # ticks in user mode; the test's own timeout
            assert worker.is_alive()
    assert set(multiprocessing.active_children()) == others
