"""Transport over a torch.distributed backend of its own.

Payloads travel as point-to-point messages rather than collectives: sizes may differ per peer without padding, nothing
is copied, no helper thread sits between us and the socket, and an error names the peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final
from weakref import WeakSet

import numpy as np
import torch

from cgx.errors import CollectiveTimeoutError, PeerLostError, TransportError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Work, broadcast_buffers


def transport_error(error: RuntimeError, doing: str, timeout_seconds: float) -> TransportError:
    """The engine's error in our class, with what this rank was doing."""
    text = str(error).strip()
    if "imed out" in text or "imeout" in text:
        return CollectiveTimeoutError(
            f"{doing} took longer than the group's timeout of {timeout_seconds:.0f} s; the peer is frozen, busy or "
            f"cut off (engine: {text})"
        )
    return PeerLostError(f"{doing} failed: the peer's process or connection is gone (engine: {text})")


@final
class _PeerWork:
    """Works of one operation, each with the peer it waits for."""

    def __init__(self, works: Sequence[tuple[str, Any]], timeout_seconds: float) -> None:
        self._works = works
        self._timeout_seconds = timeout_seconds

    def drop(self) -> None:
        """Lets go of the engine's works."""
        self._works = ()

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        for doing, work in self._works:
            remaining = max(0.001, deadline - time.monotonic())
            try:
                work.wait(timedelta(seconds=remaining))
            except RuntimeError as error:
                # A work that is still referenced, if only by this frame, would keep the connections open.
                self._works = ()
                del work
                raise transport_error(error, doing, self._timeout_seconds) from error
        self._works = ()


@final
class ProcessGroupTransport:
    """A lane over ``backend``, which must serve nothing else.

    Args:
        backend: A Gloo (or NCCL) backend object made for this lane.
        timeout_seconds: Bound of every wait.
    """

    def __init__(self, backend: Any, *, timeout_seconds: float) -> None:
        self._backend = backend
        self._rank, self._world_size = backend.rank(), backend.size()
        self._is_coalescing = backend.supports_coalescing
        self._timeout_seconds = timeout_seconds
        self._sent_nbytes = 0
        self._posted: WeakSet[_PeerWork] = WeakSet()

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return int(self._rank)

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return int(self._world_size)

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes this rank has sent so far."""
        return self._sent_nbytes

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_to_all``."""
        sends = [(peer, _tensor(b)) for peer, b in enumerate(send) if b is not None and b.size]
        recvs = [(peer, _tensor(b)) for peer, b in enumerate(recv) if b is not None and b.size]
        self._sent_nbytes += sum(tensor.nbytes for _, tensor in sends)
        works: list[tuple[str, Any]] = []
        peer = self.rank
        try:
            if self._is_coalescing:  # NCCL: messages launched one by one would wait for each other
                self._engine._start_coalescing()
            for peer, tensor in recvs:
                works.append((f"receiving from rank {peer}", self._engine.recv([tensor], peer, channel)))
            for peer, tensor in sends:
                works.append((f"sending to rank {peer}", self._engine.send([tensor], peer, channel)))
            if self._is_coalescing:
                works = [("exchanging payloads", self._engine._end_coalescing())]
        except RuntimeError as error:
            works.clear()
            raise transport_error(error, f"posting to rank {peer}", self._timeout_seconds) from error
        return self._track(works)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_gather``."""
        return self.all_to_all(broadcast_buffers(send, recv, self.rank), recv, channel)

    def all_reduce(self, x: Any) -> Work:
        """See ``Transport.all_reduce``; ``x`` is a tensor (dense or sparse) or a NumPy array."""
        tensor = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        if not tensor.is_sparse:
            self._sent_nbytes += 2 * (self.world_size - 1) * tensor.nbytes // self.world_size
        try:
            work = self._engine.allreduce([tensor])
        except RuntimeError as error:
            raise transport_error(error, "posting an all-reduce", self._timeout_seconds) from error
        return self._track([("all-reducing uncompressed", work)])

    @property
    def _engine(self) -> Any:
        # Asked each time: a local variable would live on in an error's traceback, and the connections with it.
        if self._backend is None:
            raise TransportError("this lane is closed: its session failed or was removed")
        return self._backend

    def close(self) -> None:
        """See ``Transport.close``."""
        # The engine keeps its connections open as long as any of its works lives, whoever holds it.
        for work in list(self._posted):
            work.drop()
        self._backend = None

    def _track(self, works: Sequence[tuple[str, Any]]) -> Work:
        work = _PeerWork(works, self._timeout_seconds)
        self._posted.add(work)
        return work


def _tensor(buffer: Bytes) -> torch.Tensor:
    return torch.from_numpy(buffer)
