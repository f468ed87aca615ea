"""Where namespaces are refused: the same commands, all on the loopback interface."""

import socket
import sys
from collections.abc import Sequence
from typing import Any, final

from cgx.errors import CgxError
from cgx.testbed.base import HostSet
from cgx.testbed.counters import Counters, read_counters
from cgx.testbed.hosts import Hosts
from cgx.testbed.namespaces import NamespacesRefusedError
from cgx.testbed.tether import IN_PROCESS_GROUP, Tethered


@final
class LoopbackHosts(HostSet):
    """Hosts in name only: processes of this machine that talk over loopback, without a limit.

    Commands end with this process as those of `Hosts` do, but gently: they get SIGTERM, which
    torchrun passes on to its ranks.

    Args:
        count: Number of hosts.
        refusal: Why there are no real ones, for the caller to show.
    """

    measured = False
    interface = "lo" if sys.platform == "linux" else "lo0"

    def __init__(self, count: int, refusal: str) -> None:
        self.count = count
        self.refusal = refusal
        self.addresses = ("127.0.0.1",) * count
        self._started: list[Tethered] = []

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> Tethered:
        """Starts a command on a host; see `HostSet.popen`."""
        process = Tethered(["sh", "-c", IN_PROCESS_GROUP, "sh", *argv], **options)
        self._started.append(process)
        return process

    def counters(self, host: int) -> Counters:
        """The bytes of the loopback interface, which all processes of this machine share."""
        return read_counters(self.interface)

    def set_rate(self, host: int, bit_s: float | None) -> None:
        """Refuses: there is no link.

        Raises:
            CgxError: Always.
        """
        raise CgxError(f"Loopback has no link whose rate could be set. {self.refusal}")

    def free_port(self) -> int:
        """A TCP port that nothing listened on just now."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
        return port

    def close(self) -> None:
        """Ends everything that was started and waits for it."""
        for process in self._started:
            process.release()
        for process in self._started:
            process.end(grace_seconds=40)
        self._started.clear()


def open_hosts(count: int, link_bit_s: float | None = None) -> Hosts | LoopbackHosts:
    """Opens emulated hosts, or, where the machine refuses, the same commands over loopback.

    Args:
        count: Number of hosts.
        link_bit_s: Bits per second of each link; None is no limit.

    Returns:
        Hosts to use in a `with` statement. Ask `measured` before calling a figure measured, and
        show `refusal` where it is False.

    Raises:
        SpecError: A count or rate that makes no sense.
    """
    try:
        return Hosts(count, link_bit_s)
    except NamespacesRefusedError as refused:
        return LoopbackHosts(count, refusal=str(refused))
