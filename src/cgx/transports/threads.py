"""Ranks as threads of one process: the transport of tests and of studies with many virtual ranks."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from typing import Any, final

import numpy as np

from cgx.errors import CollectiveTimeoutError, PeerLostError, WireError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Work, broadcast_buffers

_GONE = object()


@final
class ThreadHub:
    """The mailboxes that connect ``world_size`` ranks on one lane; rank ``r`` uses ``transport(r)``."""

    def __init__(self, world_size: int, *, timeout_seconds: float = 30.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.mailboxes: defaultdict[tuple[int, int, Channel], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        for sender in range(world_size):
            for receiver in range(world_size):
                for channel in Channel:
                    self.mailboxes[sender, receiver, channel] = queue.SimpleQueue()

    def transport(self, rank: int) -> ThreadTransport:
        """The lane's end for one rank."""
        return ThreadTransport(self, rank)


@final
class _MailWork:
    def __init__(self, hub: ThreadHub, rank: int, recv: PeerBuffers, channel: Channel) -> None:
        self._hub, self._rank, self._recv, self._channel = hub, rank, recv, channel

    def wait(self) -> None:
        deadline = time.monotonic() + self._hub.timeout_seconds
        for peer, buffer in enumerate(self._recv):
            if buffer is None or not buffer.size or peer == self._rank:
                continue
            mailbox = self._hub.mailboxes[peer, self._rank, self._channel]
            try:
                message = mailbox.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise CollectiveTimeoutError(
                    f"receiving from rank {peer} took longer than {self._hub.timeout_seconds} s"
                ) from None
            if message is _GONE:
                mailbox.put(_GONE)
                raise PeerLostError(f"receiving from rank {peer} failed: it closed its lane")
            if message.nbytes != buffer.nbytes:
                raise WireError(f"rank {peer} sent {message.nbytes} bytes where {buffer.nbytes} were expected")
            buffer[:] = message
        self._recv = ()


@final
class _SumWork:
    def __init__(self, gather: Work, x: Any, parts: list[Any]) -> None:
        self._gather, self._x, self._parts = gather, x, parts

    def wait(self) -> None:
        self._gather.wait()
        total = self._parts[0].astype(np.result_type(self._x, np.float64))
        for part in self._parts[1:]:
            total = total + part
        self._x[...] = total.astype(self._x.dtype)


@final
class ThreadTransport:
    """One rank's end of a ThreadHub."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._sent_nbytes = 0

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._hub.world_size

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes this rank has sent so far."""
        return self._sent_nbytes

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_to_all``; the message is copied when posted."""
        for peer, buffer in enumerate(send):
            if buffer is not None and buffer.size and peer != self._rank:
                self._sent_nbytes += buffer.nbytes
                self._hub.mailboxes[self._rank, peer, channel].put(buffer.copy())
        return _MailWork(self._hub, self._rank, recv, channel)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_gather``."""
        return self.all_to_all(broadcast_buffers(send, recv, self._rank), recv, channel)

    def all_reduce(self, x: Any) -> Work:
        """See ``Transport.all_reduce``; sums a NumPy array in fp64 and rank order."""
        parts = [x.copy() for _ in range(self.world_size)]
        send = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        recv: list[Bytes | None] = [
            None if peer == self._rank else part.reshape(-1).view(np.uint8) for peer, part in enumerate(parts)
        ]
        return _SumWork(self.all_gather(send, recv, Channel.BODY), x, parts)

    def close(self) -> None:
        """See ``Transport.close``."""
        for peer in range(self.world_size):
            for channel in Channel:
                self._hub.mailboxes[self._rank, peer, channel].put(_GONE)
