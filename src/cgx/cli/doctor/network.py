"""Which network interface Gloo will use, found the way torch finds it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from cgx.core.env import gloo_interface

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class GlooInterface(NamedTuple):
    """The interface of Gloo, and what led there.

    Attributes:
        name: As in `ip link`; None where it does not exist.
        reason: Why this one.
        is_loopback: Whether other machines cannot be reached through it.
    """

    name: str | None
    reason: str
    is_loopback: bool


def find_gloo_interface() -> GlooInterface:
    """Finds the interface: the variable's first word, else the one of the hostname's address.

    Torch takes the first address of the hostname that it can listen on, and loopback where there is
    none, with a warning that is easily missed.
    """
    interfaces = _addresses_of_interfaces()
    asked = (gloo_interface() or "").split(",")[0]
    if asked:
        exists = asked in {name for _, name in socket.if_nameindex()}
        return GlooInterface(asked if exists else None, f"{VARIABLE}={asked}", asked == "lo")
    hostname = socket.gethostname()
    address = _first_usable_address(hostname)
    if address is None:
        return GlooInterface("lo", f"the hostname {hostname!r} has no address of this machine", True)
    is_loopback = ipaddress.ip_address(address).is_loopback
    name = interfaces.get(address, "lo" if is_loopback else None)
    return GlooInterface(name, f"the hostname {hostname!r} is {address}", is_loopback)


def _first_usable_address(hostname: str) -> str | None:
    try:
        candidates = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
        except OSError:
            continue
        return str(where[0]).partition("%")[0]
    return None


def _addresses_of_interfaces() -> dict[str, str]:
    """Maps each address of this machine to the name of its interface, as far as Linux tells."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    table = Path("/proc/net/if_inet6")
    if table.exists():
        for line in table.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found
