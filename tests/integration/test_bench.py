"""`cgx bench`: it prints what it promises, and it does not call a wrong measurement verified."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cgx.cli.bench.allreduce.messages import AUTO
from cgx.cli.bench.kernels.first_use import measure_first_use
from cgx.cli.bench.kernels.subject import Subject
from cgx.cli.bench.sizes import parse_size
from cgx.core.algorithm import ALGORITHMS
from cgx.core.spec import Uniform, parse_specs
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
    "ranks_per_host",
    "algorithm",
    "how",
    "rounds",
    "counted_nbytes",
    "settle_calls",
    "chosen",
    "best",
    "auto_over_best",
    "auto_over_best_ci_low",
    "auto_over_best_ci_high",
    "auto_over_fp32",
    "auto_over_fp32_ci_low",
    "auto_over_fp32_ci_high",
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
    assert (row["algorithm"], row["how"], row["ranks_per_host"]) == ("scatter_reduce", "uniform:4", 1)
    assert row["rounds"] == 2
    assert 1 < row["counted_nbytes"] / row["wire_nbytes"] < 1.5
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
        ("--size=8KB..1KB", "smaller size first"),
        ("--spec=uniform:9", "1 to 8"),
        ("--how=auto,uniform:9", "1 to 8"),
        ("--algorithm=tree", "no algorithm"),
        ("--algorithm=hierarchical", "--ranks-per-host"),
    ],
)
def test_allreduce_refuses_with_one_sentence(option: str, said: str) -> None:
    done = run("allreduce", option)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("option", ["--how=auto", "--ranks-per-host=2"])
def test_allreduce_models_nothing_that_needs_hosts(option: str) -> None:
    done = run("allreduce", "--size=4KB", option, within=[] if REFUSAL else REFUSED)
    assert done.returncode == 1
    assert "this machine makes no emulated hosts" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.skipif(REFUSAL is not None, reason=f"{REFUSAL}")
def test_allreduce_sweeps_sizes_and_algorithms_and_auto(tmp_path: Path) -> None:
    options = ["--hosts=2", "--ranks-per-host=2", "--size=4KB,400KB", f"--algorithm={','.join(ALGORITHMS)}"]
    done = run("allreduce", *options, "--how=auto", "--runs=2", "--warmup=1", f"--plot={tmp_path}", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    candidates = [*ALGORITHMS, AUTO]
    assert [(row["raw_nbytes"], row["algorithm"]) for row in rows] == [
        (nbytes, name) for nbytes in (4_000, 400_000) for name in candidates
    ]
    assert all(row["verified"] and row["ranks_per_host"] == 2 and row["rounds"] == 2 for row in rows)
    for row in rows:
        if row["how"] == AUTO:
            assert row["auto_over_best_ci_low"] <= row["auto_over_best"] <= row["auto_over_best_ci_high"]
            assert row["auto_over_fp32_ci_low"] <= row["auto_over_fp32"] <= row["auto_over_fp32_ci_high"]
            assert row["settle_calls"] > 0
            assert row["chosen"]
        else:
            assert row["auto_over_best"] is None
    by_name = {row["algorithm"]: row for row in rows[len(candidates) :]}
    # Between two hosts of two ranks, in copies of one compressed gradient: 1 leaves a host, without a hierarchy 2.
    crossing = by_name["hierarchical"]["counted_nbytes"] / by_name["scatter_reduce"]["counted_nbytes"]
    assert crossing == pytest.approx(1 / 2, abs=0.1)
    assert (tmp_path / "allreduce.png").stat().st_size > 10_000


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
