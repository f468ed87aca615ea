"""How a link is limited: the token bucket that `tc` puts on each of its ends."""

from typing import Final

from cgx.errors import SpecError
from cgx.testbed.namespaces import Namespace

_MIN_BIT_S: Final = 8_000.0
_BURST_SECONDS: Final = 1e-3
_MIN_BURST_NBYTES: Final = 3 * 1514
_QUEUE_SECONDS: Final = 50e-3
_MIN_QUEUE_NBYTES: Final = 256 * 1024
_MAX_PACKET_NBYTES: Final = 65536


def check_rate(bit_s: float | None) -> None:
    """Refuses a rate that `shape` cannot make.

    Raises:
        SpecError: It is not a number, or below 8 kbit/s, where one frame takes over a second.
    """
    if bit_s is not None and not _MIN_BIT_S <= bit_s < float("inf"):
        raise SpecError(
            f"A link of {bit_s} bits per second was asked for; give at least {_MIN_BIT_S:.0f}, or None for no limit."
        )


def shape(namespace: Namespace, interface: str, bit_s: float | None) -> None:
    """Gives an interface a rate for what it sends, or takes the limit away.

    The bucket holds what the link carries in a millisecond: with more, the first bytes of every
    message go faster than the link; with much less, two-way traffic stalls. TCP then hands down no
    larger packets than the bucket holds, because `tc` would cut them up, and every two frames of
    1.5 kB get an acknowledgement of their own, which takes 2 % of the other direction.

    Args:
        namespace: Where the interface is.
        interface: Its name there.
        bit_s: Bits per second of whole frames; None is no limit.
    """
    qdisc = ["qdisc", "replace", "dev", interface, "root"]
    if bit_s is None:
        namespace.run("tc", *qdisc, "noqueue")
        packet_nbytes = _MAX_PACKET_NBYTES
    else:
        burst_nbytes = max(round(bit_s / 8 * _BURST_SECONDS), _MIN_BURST_NBYTES)
        queue_nbytes = max(round(bit_s / 8 * _QUEUE_SECONDS), _MIN_QUEUE_NBYTES)
        bucket = ["rate", f"{round(bit_s)}bit", "burst", f"{burst_nbytes}"]
        namespace.run("tc", *qdisc, "tbf", *bucket, "limit", f"{queue_nbytes}")
        packet_nbytes = min(burst_nbytes, _MAX_PACKET_NBYTES)
    namespace.run("ip", "link", "set", "dev", interface, "gso_max_size", f"{packet_nbytes}")
