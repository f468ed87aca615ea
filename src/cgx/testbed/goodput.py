"""What the links of a set of hosts really carry, by raw TCP streams."""

import sys
from typing import Final

from cgx.errors import SpecError
from cgx.testbed.base import HostSet

_START_SECONDS: Final = 30.0


def measure_goodput(hosts: HostSet, *, nbytes: int, timeout_seconds: float = 120.0) -> float:
    """Measures the goodput of the links with the traffic of a reduction, at rest.

    Every host sends `nbytes` to the others and receives as much, all at once. To measure in the
    same run as something else, let the ranks call `cgx.testbed.stream.exchange` themselves.

    Args:
        hosts: At least two.
        nbytes: Bytes that each host sends in the time that counts; three times as many in all.
        timeout_seconds: Bound on every wait.

    Returns:
        Payload bits per second that each host got, in each direction.

    Raises:
        SpecError: There is only one host.
        JobFailedError: The streams failed on some host, or took too long.
    """
    if hosts.count < 2:
        raise SpecError("One host has no other to talk to; goodput needs at least two.")
    common = [
        *(sys.executable, "-m", "cgx.testbed.stream"),
        *("--addresses", ",".join(hosts.addresses), "--port", f"{hosts.free_port()}"),
        *("--nbytes", f"{nbytes}", "--timeout-seconds", f"{timeout_seconds}"),
    ]
    with hosts.start([[*common, "--rank", f"{host}"] for host in range(hosts.count)]) as job:
        seconds = [float(text) for text in job.wait(timeout_seconds + _START_SECONDS)]
    return nbytes * 8 / max(seconds)
