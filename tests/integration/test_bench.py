"""`cgx bench`: it prints what it promises, and it does not call a wrong measurement verified."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from cgx.cli.bench.allreduce.messages import CGX, FP16, FP32, Assignment, Measured, Track
from cgx.cli.bench.allreduce.results import judge
from cgx.cli.bench.fidelity import allowed_nmse, nmse
from cgx.cli.bench.kernels.first_use import measure_first_use
from cgx.cli.bench.kernels.subject import Subject
from cgx.cli.bench.sizes import parse_size
from cgx.core.spec import PhaseSpecs, Uniform, parse_specs
from cgx.errors import SpecError
from cgx.testbed import refusal

KEYS = [
    "op",
    "hosts",
    "link",
    "spec",
    "raw_nbytes",
    "wire_nbytes",
    "bits_per_element",
    "p20_s",
    "p50_s",
    "p80_s",
    "baseline_p50_s",
    "baseline16_p50_s",
    "speedup",
    "speedup16",
    "goodput_bit_s",
    "wire_bound_s",
    "wire_efficiency",
    "cpu_s_per_gb",
    "nmse",
    "verified",
]
REFUSAL = refusal()
CGX_COMMAND = [sys.executable, "-c", "from cgx.cli import main; main()", "bench"]
# A user namespace of its own, in which no further network namespace may be made.
REFUSED = [
    *("unshare", "--user", "--map-root-user"),
    *("sh", "-c", 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh"),
]


def run(*arguments: str, within: tuple[str, ...] | list[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*within, *CGX_COMMAND, *arguments], capture_output=True, text=True, timeout=110, check=False)


# `cgx bench allreduce`.


@pytest.mark.skipif(REFUSAL is not None, reason=f"{REFUSAL}")
def test_allreduce_prints_one_verified_object() -> None:
    done = run("allreduce", "--link=1gbit", "--size=400KB", "--runs=2", "--warmup=1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(row) == KEYS
    assert row["verified"] is True
    assert (row["op"], row["hosts"], row["link"]) == ("all_reduce", 2, "1gbit")
    assert row["spec"] == str(parse_specs("uniform:4"))
    assert row["raw_nbytes"] == 400_000
    assert 4.25 < row["bits_per_element"] < 4.26
    assert 0 < row["nmse"] < 0.02
    assert row["p20_s"] <= row["p50_s"] <= row["p80_s"]
    assert row["speedup"] == pytest.approx(row["baseline_p50_s"] / row["p50_s"])
    assert row["speedup16"] == pytest.approx(row["baseline16_p50_s"] / row["p50_s"])
    assert row["wire_bound_s"] == pytest.approx(8 * row["wire_nbytes"] / row["goodput_bit_s"])
    assert row["wire_efficiency"] == pytest.approx(row["wire_bound_s"] / row["p50_s"])


def test_allreduce_models_the_link_where_namespaces_are_refused() -> None:
    options = ["--hosts=3", "--link=1gbit", "--size=400KB", "--runs=1", "--warmup=1", "--spec=uniform:2+bf16"]
    done = run("allreduce", *options, "--json", within=[] if REFUSAL else REFUSED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No emulated hosts here" in done.stderr
    row = json.loads(done.stdout)
    assert row["link"] == "1gbit (modelled)"
    assert row["goodput_bit_s"] == 1e9
    assert row["verified"] is True
    # One copy takes 2.25 bits in phase one and 16 in phase two.
    assert row["bits_per_element"] == pytest.approx((2.25 + 16) / 2, abs=0.02)
    # 2 of 3 parts in each direction, 4 bytes each: the model lets nothing pass sooner.
    assert row["baseline_p50_s"] > 2 * 2 / 3 * 400_000 * 8 / 1e9


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--link=100", "not a link rate"),
        ("--size=100", "not a size"),
        ("--size=1B", "holds no element"),
        ("--spec=uniform:9", "1 to 8"),
    ],
)
def test_allreduce_refuses_with_one_sentence(option: str, said: str) -> None:
    done = run("allreduce", option)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# What makes a measurement verified.

RAW_NBYTES, PAYLOAD_NBYTES, SECONDS = 1_000_000, 125_000, 0.02
ASSIGNMENT = Assignment(
    spec="uniform:4",
    numel=RAW_NBYTES // 4,
    runs=2,
    warm_up=1,
    interface="eth0",
    addresses=("10.77.0.1", "10.77.0.2"),
    goodput_port=1,
    throttle_bit_s=None,
    timeout_seconds=1.0,
)


def honest_ranks() -> list[Measured]:
    """Two ranks whose measurements agree: 125 kB of payload in 20 ms at 100 Mbit/s, a bound of 10 ms."""
    rounds = ASSIGNMENT.runs
    return [
        Measured(
            rank=rank,
            tracks={
                name: Track(
                    seconds=[SECONDS * factor + 0.001 * rank] * rounds,
                    cpu_seconds=[0.001 + 0.002 * rank] * rounds,
                    counted_nbytes=[round(PAYLOAD_NBYTES * factor * 1.01)] * rounds,
                    digests=[f"{name} {index}" for index in range(rounds)],
                    nmses=[0.01] * rounds if rank == 0 else [],
                )
                for name, factor in ((CGX, 1), (FP32, 8), (FP16, 4))
            },
            payload_nbytes=[PAYLOAD_NBYTES] * rounds,
            goodput_seconds=[0.01] * rounds,
            exchanged_nbytes=PAYLOAD_NBYTES,
            allowed_nmses=dict.fromkeys((CGX, FP32, FP16), 0.02) if rank == 0 else {},
        )
        for rank in range(ASSIGNMENT.world_size)
    ]


def test_judge_takes_the_slowest_rank() -> None:
    judgement = judge(ASSIGNMENT, honest_ranks()[::-1], link="100mbit")
    result = judgement.result
    assert not judgement.faults
    assert result.verified
    assert [field.name for field in fields(result)] == KEYS
    assert result.p50_s == pytest.approx(0.021)
    assert result.speedup == pytest.approx(0.161 / 0.021)
    assert result.speedup16 == pytest.approx(0.081 / 0.021)
    assert result.goodput_bit_s == pytest.approx(1e8)
    assert result.wire_efficiency == pytest.approx(0.010 / 0.021)
    assert result.bits_per_element == pytest.approx(8 * PAYLOAD_NBYTES / ASSIGNMENT.numel)
    assert result.cpu_s_per_gb == pytest.approx(0.002 / (RAW_NBYTES / 1e9))


def spoil(ranks: list[Measured], rank: int, name: str, **entries: list[object]) -> list[Measured]:
    """The same measurements, but for the last round of one contender on one rank."""
    track = ranks[rank].tracks[name]
    kept = {key: [*getattr(track, key)[:-1], *last] for key, last in entries.items()}
    tracks = {**ranks[rank].tracks, name: replace(track, **kept)}
    return [*ranks[:rank], replace(ranks[rank], tracks=tracks), *ranks[rank + 1 :]]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        pytest.param(spoil(honest_ranks(), 1, CGX, digests=["other"]), "cgx, round 1: ranks ended", id="replicas"),
        pytest.param(spoil(honest_ranks(), 0, FP16, digests=["other"]), "fp16, round 1", id="replicas of a baseline"),
        pytest.param(spoil(honest_ranks(), 0, CGX, nmses=[0.021]), "0.021 of the mean", id="error"),
        pytest.param(spoil(honest_ranks(), 0, CGX, nmses=[math.nan]), "nan of the mean", id="NaN"),
        pytest.param(spoil(honest_ranks(), 1, CGX, counted_nbytes=[PAYLOAD_NBYTES - 1]), "124999", id="too few bytes"),
        pytest.param(spoil(honest_ranks(), 1, CGX, counted_nbytes=[150_000]), "150000", id="too many bytes"),
        pytest.param(
            [replace(rank, goodput_seconds=[0.022] * 2) for rank in honest_ranks()],
            "less than the 0.022 s in which raw streams",
            id="faster than the wire",
        ),
    ],
)
def test_judge_finds(ranks: list[Measured], said: str) -> None:
    judgement = judge(ASSIGNMENT, ranks, link="100mbit")
    assert not judgement.result.verified
    (fault,) = judgement.faults
    assert said in fault


def test_allowed_error_holds_for_rounding_and_not_for_a_lost_rank() -> None:
    generator = np.random.default_rng(0)
    parts = generator.standard_normal((4, 50_001), np.float32)
    mean = parts.astype(np.float64).mean(axis=0)
    specs = PhaseSpecs(Uniform(4), Uniform(4))
    allowed = allowed_nmse(specs, parts, mean)
    steps = [(part.max() - part.min()) / 15 for part in parts]
    nearest = np.mean([np.round(p / s) * s for p, s in zip(parts, steps, strict=True)], axis=0, dtype=np.float32)
    assert 0 < nmse(nearest, mean) < allowed
    assert nmse(parts[:3].mean(axis=0), mean) > allowed


# `cgx bench kernels`.


def test_kernels_prints_verified_rows() -> None:
    options = ["--size=40KB", "--runs=1", "--spec=uniform:3", "--dtype=fp32", "--dtype=bf16", "--no-first-use"]
    done = run("kernels", *options, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, environment = [json.loads(line) for line in done.stdout.splitlines()]
    names = ["encode", "decode", "decode_add", "reduce_1", "reduce_3"]
    assert [(row["dtype"], row["op"]) for row in rows] == [(d, name) for d in ("fp32", "bf16") for name in names]
    for row in rows:
        assert row["verified"] is True
        assert row["raw_nbytes"] == 40_000
        assert row["ratio"] == pytest.approx(row["baseline_p50_s"] / row["p50_s"])
        assert row["baseline"] == row["op"].replace("reduce", "steps") if "reduce" in row["op"] else "memcpy"
    assert environment["op"] == "environment"
    assert environment["command"].startswith("cgx bench kernels --size=40KB")
    assert {"cgx", "python", "numpy", "numba", "torch"} <= environment["versions"].keys()


@pytest.mark.parametrize(
    ("option", "said"),
    [("--spec=bf16", "only uniform specs"), ("--dtype=fp64", "not a dtype"), ("--size=big", "not a size")],
)
def test_kernels_refuses_with_one_sentence(option: str, said: str) -> None:
    done = run("kernels", option)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_wrong_result_is_not_right(dtype: str) -> None:
    operations = {each.name: each for each in Subject(Uniform(4), dtype, 100_000).operations()}
    for name, other in (("decode", "decode_add"), ("reduce_1", "steps_3"), ("reduce_3", "steps_1")):
        for each in (name, other):
            operations[each].prepare()
            operations[each].run()
            # The other operation leaves its own result where this one's was.
            assert operations[name].is_right() is (each == name)


def test_first_use_is_timed_in_fresh_processes() -> None:
    found = measure_first_use(Uniform(2))
    assert found.spec == str(Uniform(2))
    assert min(found.cold_s, found.warm_s) > 0


@pytest.mark.parametrize(("text", "nbytes"), [("1KB", 1000), ("2.5mb", 2_500_000), (" 1GB ", 10**9), ("4B", 4)])
def test_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "100", "MB", "-1MB", "1 MB", "1MiB", "3B", "0GB"])
def test_size_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_size(text)


def test_rate_distortion_writes_its_tables(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "rate_distortion.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", f"--out={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "rate_distortion.json").read_text(encoding="utf-8"))
    unbiased, biased = (
        [row for row in written["rows"] if ("nearest" in row["specs"].partition("+")[0]) is is_biased]
        for is_biased in (False, True)
    )
    # What one key loses, others give back; the same loss every time stays whole.
    assert all(row["averaging"] < 2 for row in unbiased)
    assert all(row["averaging"] > 7 for row in biased)
    table = (tmp_path / "rate_distortion.md").read_text(encoding="utf-8")
    assert all(f"| {size} ranks |" in table for size in (2, 4, 8))
