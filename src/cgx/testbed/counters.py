"""What the kernel counted on a network interface."""

from pathlib import Path
from typing import NamedTuple

from cgx.errors import CgxError


class Counters(NamedTuple):
    """Bytes an interface has moved since it was made, frame headers included."""

    rx_nbytes: int
    tx_nbytes: int


def read_counters(interface: str, *, pid: int | None = None) -> Counters:
    """Reads the byte counters of an interface.

    `/proc` is used because it shows the network namespace of the process that reads it, while
    `/sys` keeps showing the one it was mounted in.

    Args:
        interface: Name of the interface, for example ``eth0``.
        pid: Look in the network namespace of this process; None is the calling process.

    Raises:
        CgxError: There is no such interface, or no such table on this system.

    Cost:
        One small read, no process: cheap enough to frame every iteration.
    """
    table = Path(f"/proc/{'self' if pid is None else pid}/net/dev")
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError as error:
        raise CgxError(f"Cannot read the interface counters: {error}.") from error
    rows = {name.strip(): row.split() for name, _, row in (line.partition(":") for line in lines)}
    if interface not in rows:
        raise CgxError(f"No interface {interface!r} to count bytes on; {table} lists {', '.join(rows)}.")
    return Counters(rx_nbytes=int(rows[interface][0]), tx_nbytes=int(rows[interface][8]))
