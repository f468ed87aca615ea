"""Emulated hosts: they connect, they are as slow as asked, and nothing of them stays behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx.errors import CgxError, SpecError, TransportError
from cgx.testbed import (
    Hosts,
    HostSet,
    JobFailedError,
    LoopbackHosts,
    format_rate,
    measure_goodput,
    open_hosts,
    parse_rate,
    read_counters,
    refusal,
)
from cgx.testbed.stream import exchange

REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(REFUSAL is not None, reason=f"{REFUSAL}")

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {x.unique().tolist()}\\n")
dist.destroy_process_group()
"""


@pytest.fixture(params=[pytest.param("namespaces", marks=needs_namespaces), "loopback"])
def pair(request: pytest.FixtureRequest) -> Iterator[HostSet]:
    """Two hosts of either kind."""
    hosts = Hosts(2) if request.param == "namespaces" else LoopbackHosts(2, "as the test wants")
    with hosts:
        yield hosts


def run_python(program: str, *, within: tuple[str, ...] = (), timeout_seconds: float = 60) -> str:
    """Runs a program in a Python of its own, behind a command that changes what it may do."""
    done = subprocess.run(
        [*within, sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Rates.


@pytest.mark.parametrize(
    ("text", "bit_s"),
    [
        ("1gbit", 1e9),
        ("10Gbit", 1e10),
        ("100mbit", 1e8),
        ("2.5MBIT", 2.5e6),
        ("50kbit", 5e4),
        ("9600bit", 9600.0),
        ("none", None),
    ],
)
def test_rate_is_read(text: str, bit_s: float | None) -> None:
    assert parse_rate(text) == bit_s


@given(st.floats(1, 1e12))
def test_rate_survives_being_written(bit_s: float) -> None:
    assert parse_rate(format_rate(bit_s)) == bit_s


@pytest.mark.parametrize("text", ["100", "1e9", "100mbps", "-1mbit", "fast", "", "1 gbit", "0mbit"])
def test_rate_without_a_meaning_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"100mbit|above zero"):
        parse_rate(text)


@pytest.mark.parametrize(("count", "bit_s"), [(0, None), (251, None), (2, 0.0), (2, float("nan"))])
def test_impossible_hosts_are_refused(count: int, bit_s: float | None) -> None:
    with pytest.raises(SpecError):
        open_hosts(count, bit_s)


# Links.


@needs_namespaces
@pytest.mark.parametrize("count", [2, 4])
def test_link_carries_what_it_was_asked_to(count: int) -> None:
    with Hosts(count, 100e6) as hosts:
        goodput_bit_s = measure_goodput(hosts, nbytes=1_000_000)
    assert 80e6 < goodput_bit_s < 100e6


@needs_namespaces
def test_rate_changes_while_hosts_run() -> None:
    with Hosts(2, 100e6) as hosts:
        for host in range(2):
            hosts.set_rate(host, 20e6)
        slow_bit_s = measure_goodput(hosts, nbytes=200_000)
        hosts.set_rate(0, None)
        hosts.set_rate(1, None)
        free_bit_s = measure_goodput(hosts, nbytes=10_000_000)
    assert 16e6 < slow_bit_s < 20e6
    assert free_bit_s > 100e6


@needs_namespaces
def test_counters_count_what_was_sent() -> None:
    nbytes = 300_000
    look = "from cgx.testbed import read_counters; print(*read_counters('eth0'))"
    with Hosts(3) as hosts:
        before = [hosts.counters(host) for host in range(3)]
        measure_goodput(hosts, nbytes=nbytes)
        after = [hosts.counters(host) for host in range(3)]
        with hosts.start([[sys.executable, "-c", look]] * 3) as job:
            seen_inside = job.wait(30)
    for host in range(3):
        for earlier, later, inside in zip(before[host], after[host], map(int, seen_inside[host].split()), strict=True):
            assert 3 * nbytes < later - earlier < 3.3 * nbytes
            # The last acknowledgements and farewells may still have been under way.
            assert later <= inside < later + 10_000


def test_unknown_interface_is_named() -> None:
    with pytest.raises(CgxError, match="nothere0"):
        read_counters("nothere0")


def test_streams_that_lack_a_rank_end_in_time() -> None:
    port = LoopbackHosts(2, "").free_port()
    with pytest.raises(TransportError, match="Rank 1 of 2"):
        exchange(["127.0.0.1"] * 2, 1, nbytes=1, port=port, timeout_seconds=0.3)


# Jobs.


def test_output_comes_line_by_line(pair: HostSet) -> None:
    script = "echo one; echo two >&2; sleep 0.2; printf three"
    with pair.start([["sh", "-c", script]] * 2) as job:
        lines = sorted(job.lines(30))
        errors = [job.stderr(host) for host in range(2)]
    assert lines == [(0, "one"), (0, "three"), (1, "one"), (1, "three")]
    assert errors == ["two\n"] * 2


def test_first_failure_ends_the_job(pair: HostSet) -> None:
    commands = [["sleep", "600"], ["sh", "-c", "echo out of luck >&2; kill -SEGV $$"]]
    with pair.start(commands) as job, pytest.raises(JobFailedError) as caught:
        job.wait(60)
    assert "host 1 of 2 ended with exit code 139" in str(caught.value)
    assert "out of luck" in str(caught.value)
    assert "host 0" not in str(caught.value)
    assert all(process.returncode is not None for process in job.processes)


def test_overtime_ends_the_job(pair: HostSet) -> None:
    commands = [["true"], ["sh", "-c", "echo still here >&2; sleep 600"]]
    with pair.start(commands) as job, pytest.raises(JobFailedError) as caught:
        job.wait(0.5)
    assert "host 1 of 2 was still running" in str(caught.value)
    assert "still here" in str(caught.value)


@needs_namespaces
@pytest.mark.parametrize("count", [2, 3])
def test_torchrun_spans_the_hosts(count: int, tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with Hosts(count, 1e9) as hosts, hosts.torchrun([f"{script}"]) as job:
        outputs = job.wait(100)
        sent_nbytes = [hosts.counters(host).tx_nbytes for host in range(count)]
    total = float(sum(range(count + 1)))
    assert outputs == [f"{rank} {count} [{total}]\n" for rank in range(count)]
    assert min(sent_nbytes) > 4000 * 2 * (count - 1) // count


def test_torchrun_over_loopback(tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with LoopbackHosts(2, "") as hosts, hosts.torchrun([f"{script}"], ranks_per_host=2) as job:
        first, second = job.wait(100)
    assert sorted(first.splitlines()) == ["0 4 [10.0]", "1 4 [10.0]"]
    assert sorted(second.splitlines()) == ["2 4 [10.0]", "3 4 [10.0]"]


def test_failing_rank_ends_torchrun_everywhere(pair: HostSet, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, time\nassert os.environ['RANK'] != '1', 'rank one is ill'\ntime.sleep(600)\n")
    before = set(processes_below(os.getpid()))
    with pair.torchrun([f"{script}"]) as job:
        with pytest.raises(JobFailedError, match="rank one is ill"):
            job.wait(100)
        assert set(processes_below(os.getpid())) == before


# Who may, and who may not.

SHORT_RUN = """
import os
from cgx.testbed import measure_goodput, open_hosts
with open_hosts(2, 100e6) as hosts:
    print(os.geteuid(), hosts.measured, hosts.refusal)
    goodput_bit_s = measure_goodput(hosts, nbytes=1_000_000)
print(goodput_bit_s)
"""


@needs_namespaces
def test_an_ordinary_user_gets_hosts_too() -> None:
    # The user is made rather than borrowed, so that it can read this checkout wherever it is.
    ordinary = ("unshare", "--user", "--map-user=1000", "--map-group=1000") if os.geteuid() == 0 else ()
    who, goodput_bit_s = run_python(SHORT_RUN, within=ordinary).splitlines()
    assert who == f"{1000 if ordinary else os.geteuid()} True None"
    assert 80e6 < float(goodput_bit_s) < 100e6


def test_refused_namespaces_are_explained_and_replaced() -> None:
    refuse = ("unshare", "--map-root-user", "sh", "-c")
    script = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    within = () if REFUSAL else (*refuse, script, "sh")
    who, goodput_bit_s = run_python(SHORT_RUN, within=within).splitlines()
    assert " False " in who
    if not REFUSAL:
        assert "gives no network namespace (unshare: " in who
    assert float(goodput_bit_s) > 0


@needs_namespaces
def test_missing_tool_is_named() -> None:
    tc = shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    hide = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    script = 'mount --bind /dev/null "$0" && exec "$@"'
    said = run_python("from cgx.testbed import refusal; print(refusal())", within=(*hide, script, f"{tc}"))
    assert "`tc`" in said
    assert "iproute2" in said


# What stays behind: nothing.

SUPERVISOR = """
import time
from cgx.testbed import Hosts, LoopbackHosts
with {hosts} as hosts:
    with hosts.start([["sh", "-c", "{command}"]] * 2) as job:
        lines = job.lines()
        next(lines), next(lines)
        print("ready", flush=True)
        input()
        {ending}
"""


def processes_below(root: int) -> dict[int, str]:
    """The network namespace of every living process that descends from one, by its id."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = stat.read_text().rpartition(")")
        except OSError:  # it ended while we looked
            continue
        if fields.split()[0] not in "ZX":
            parents[int(stat.parent.name)] = int(fields.split()[1])
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: network_of(pid) for pid in below - {root}}


def network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return "gone"


def networks_in_use() -> set[str]:
    return {network_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}


@pytest.mark.parametrize("hosts", [pytest.param("Hosts(2, 100e6)", marks=needs_namespaces), "LoopbackHosts(2, '')"])
@pytest.mark.parametrize(
    ("ending", "signal_number", "code"),
    [
        pytest.param("pass", None, 0, id="end"),
        pytest.param("raise RuntimeError", None, 1, id="exception"),
        pytest.param("time.sleep(600)", signal.SIGINT, -signal.SIGINT, id="interrupt"),
        pytest.param("list(lines)", signal.SIGINT, -signal.SIGINT, id="interrupted wait"),
        pytest.param("time.sleep(600)", signal.SIGTERM, -signal.SIGTERM, id="terminate"),
        pytest.param("time.sleep(600)", signal.SIGKILL, -signal.SIGKILL, id="kill"),
    ],
)
def test_nothing_stays_behind(hosts: str, ending: str, signal_number: int | None, code: int) -> None:
    real = hosts.startswith("Hosts")
    # A daemon escapes from every session and group, though not from a namespace.
    command = f"{'setsid sleep 600 &' if real else ''} echo up; sleep 600"
    program = SUPERVISOR.format(hosts=hosts, command=command, ending=ending)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        below = processes_below(supervisor.pid)
        networks = set(below.values()) - {network_of(os.getpid())}
        assert len(networks) == (3 if real else 0)
        assert len(below) >= 4
        supervisor.stdin.write("\n")
        supervisor.stdin.flush()
        if signal_number is not None:
            time.sleep(0.2)
            supervisor.send_signal(signal_number)
        assert supervisor.wait(30) == code

    deadline = time.monotonic() + 10
    while networks & networks_in_use() or any(network_of(pid) != "gone" for pid in below):
        assert time.monotonic() < deadline, "something stayed behind"
        time.sleep(0.02)
    if real and shutil.which("lsns"):
        listed = subprocess.run(
            ["lsns", "--type", "net", "--noheadings", "--output", "NS"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert not {f"net:[{inode}]" for inode in listed.stdout.split()} & networks
