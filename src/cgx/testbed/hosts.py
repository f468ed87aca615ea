"""Emulated hosts: network namespaces on one machine, each behind a link of a stated rate."""

import itertools
from collections.abc import Sequence
from typing import Any, Final, final

from cgx.errors import SpecError
from cgx.testbed import links
from cgx.testbed.base import HostSet
from cgx.testbed.counters import Counters, read_counters
from cgx.testbed.namespaces import Namespace, NamespacesRefusedError
from cgx.testbed.tether import Tethered

_INTERFACE: Final = "eth0"
_FIRST_PORT: Final = 29500
_MAX_COUNT: Final = 250
# Every kernel has it, so figures do not depend on the machine's default; BBR, for one, gets four
# hosts only 0.75 to 0.93 of these links where Reno gets 0.95.
_CONGESTION_CONTROL: Final = "reno"


@final
class Hosts(HostSet):
    """Hosts in network namespaces, joined by a switch.

    Each host has an interface ``eth0`` with the address ``10.77.0.(i + 1)``, one end of a link to a
    switch in a namespace of its own. Both ends of a link are limited, so a host sends and receives
    at the stated rate at once. Nothing outside these namespaces is touched.

    When this process ends, however it ends, the kernel removes all of it.

    Args:
        count: Number of hosts, 1 to 250.
        link_bit_s: Bits per second of each link, both ways, counting whole frames (TCP carries
            some 95 % of it); None is as fast as the machine.

    Raises:
        NamespacesRefusedError: This machine does not allow it; the message says what is missing.
        SpecError: A count or rate that makes no sense.

    Cost:
        Some 50 milliseconds and two sleeping processes per host.

    Example:
        >>> with Hosts(2, 100e6) as hosts:  # doctest: +SKIP
        ...     hosts.torchrun(["train.py"]).wait()
    """

    measured = True
    refusal = None
    interface = _INTERFACE

    def __init__(self, count: int, link_bit_s: float | None = None) -> None:
        if not 1 <= count <= _MAX_COUNT:
            raise SpecError(f"{count} hosts were asked for; 1 to {_MAX_COUNT} can be had.")
        links.check_rate(link_bit_s)
        self.count = count
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(count))
        self._ports = itertools.count(_FIRST_PORT)
        self._started: list[Tethered] = []
        self._namespaces: list[Namespace] = []
        try:
            self._switch = self._make_switch()
            self._hosts = [self._make_host(host, link_bit_s) for host in range(count)]
        except BaseException:
            self.close()
            raise

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> Tethered:
        """Starts a command on a host; see `HostSet.popen`."""
        process = self._hosts[host].popen(argv, **options)
        self._started.append(process)
        return process

    def counters(self, host: int) -> Counters:
        """The bytes a host's interface has moved."""
        return read_counters(_INTERFACE, pid=self._hosts[host].pid)

    def set_rate(self, host: int, bit_s: float | None) -> None:
        """Changes the rate of a host's link, both ways, while it is in use."""
        links.check_rate(bit_s)
        links.shape(self._hosts[host], _INTERFACE, bit_s)
        links.shape(self._switch, f"port{host}", bit_s)

    def free_port(self) -> int:
        """A TCP port that nothing listens on, on any host: all are ours."""
        return next(self._ports)

    def close(self) -> None:
        """Ends everything that runs on the hosts, and the hosts."""
        for process in self._started:
            process.release()
        for process in self._started:
            process.end()
        for namespace in reversed(self._namespaces):
            namespace.close()
        self._started.clear()
        self._namespaces.clear()

    def _make_switch(self) -> Namespace:
        switch = Namespace()
        self._namespaces.append(switch)
        # Without snooping and IPv6 addresses the only frames are those the hosts send.
        switch.run(
            *("ip", "-batch", "-"),
            script="link add name switch type bridge mcast_snooping 0\nlink set switch addrgenmode none up\n",
        )
        return switch

    def _make_host(self, host: int, link_bit_s: float | None) -> Namespace:
        namespace = Namespace(self._switch)
        self._namespaces.append(namespace)
        port = f"port{host}"
        self._switch.run(
            *("ip", "-batch", "-"),
            script=f"link add name {port} type veth "
            f"peer name {_INTERFACE} netns {namespace.pid}\n"
            f"link set {port} master switch addrgenmode none up\n",
        )
        namespace.run(
            *("ip", "-batch", "-"),
            script=f"link set {_INTERFACE} addrgenmode none up\n"
            f"address add {self.addresses[host]}/24 dev {_INTERFACE}\n"
            f"route replace 10.77.0.0/24 dev {_INTERFACE} "
            f"src {self.addresses[host]} congctl {_CONGESTION_CONTROL}\n",
        )
        if link_bit_s is not None:
            links.shape(namespace, _INTERFACE, link_bit_s)
            links.shape(self._switch, port, link_bit_s)
        return namespace


def refusal() -> str | None:
    """Why this machine has no emulated hosts; None when it has. It tries, in 0.1 seconds."""
    try:
        with Hosts(1, 1e9):
            return None
    except NamespacesRefusedError as error:
        return str(error)
