"""A stated link rate on top of any transport: what a slower link would do, for people without root.

Figures obtained through it are *modelled*: each rank has one full-duplex link, messages leave one after another, and an
operation ends no sooner than the bytes this rank sent could have left at the stated rate.
"""

from __future__ import annotations

import threading
import time
from typing import Any, final

from cgx.errors import SpecError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Transport, Work


@final
class ModelledLink:
    """The clock of one rank's link, shared by all lanes that use it.

    Args:
        bit_s: Rate in bits per second, each way.
    """

    def __init__(self, bit_s: float) -> None:
        if not bit_s > 0:
            raise SpecError(f"a modelled link needs a rate above zero bits per second, found {bit_s!r}")
        self.bit_s = bit_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def occupy(self, nbytes: int) -> float:
        """Queues ``nbytes`` behind what is already on the link and returns when the last bit has left."""
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + 8 * nbytes / self.bit_s
            return self._free_at


@final
class _LateWork:
    def __init__(self, work: Work, ready_at: float) -> None:
        self._work, self._ready_at = work, ready_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._ready_at - time.monotonic()))


@final
class ThrottledTransport:
    """``transport`` behind ``link``."""

    def __init__(self, transport: Transport, link: ModelledLink) -> None:
        self._transport = transport
        self._link = link

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._transport.world_size

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes this rank has sent so far."""
        return self._transport.sent_nbytes

    def _late(self, work: Work, sent_before: int) -> Work:
        return _LateWork(work, self._link.occupy(self._transport.sent_nbytes - sent_before))

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_to_all``."""
        before = self._transport.sent_nbytes
        return self._late(self._transport.all_to_all(send, recv, channel), before)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_gather``."""
        before = self._transport.sent_nbytes
        return self._late(self._transport.all_gather(send, recv, channel), before)

    def all_reduce(self, x: Any) -> Work:
        """See ``Transport.all_reduce``."""
        before = self._transport.sent_nbytes
        return self._late(self._transport.all_reduce(x), before)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._transport.close()
