"""`cgx doctor` on this machine, and on one that it must find fault with."""

import json
import os
import subprocess
import sys

import pytest


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cgx.cli import main; main()", "doctor", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_finds_this_machine_well() -> None:
    done = run_doctor("--json", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row.keys() == {"check", "ok", "found", "remedy", "needed"} for row in findings)
    assert all(row["ok"] for row in findings if row["needed"])
    assert all(row["remedy"] for row in findings if not row["ok"])
    by_check = {row["check"]: row for row in findings}
    assert "byte-equal" in by_check["kernels: CPU"]["found"]
    assert "bit-identical" in by_check["reduction"]["found"]
    assert by_check["network"]["found"].startswith("Gloo will use lo (GLOO_SOCKET_IFNAME=lo)")


def test_names_what_is_wrong_and_the_remedy() -> None:
    done = run_doctor(GLOO_SOCKET_IFNAME="no-such-interface")
    assert done.returncode == 1
    assert "cgx cannot work here yet: network" in done.stdout
    assert "ip link" in done.stdout


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_without_the_extra_says_what_to_install(package: str) -> None:
    program = f"import sys; sys.modules['{package}'] = None; from cgx.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        f"The cgx command needs {package}, which is missing: pip install 'cgx[demo]'"
    ]
