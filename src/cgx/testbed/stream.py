"""Raw TCP streams in the directions of a reduction: what the links really carry.

Every rank sends to every other rank, all at once, over one connection per pair, as Gloo does. Ranks
that already run call `exchange` together; for hosts where nothing runs, ``python -m
cgx.testbed.stream`` is one rank.
"""

import argparse
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from cgx.errors import SpecError, TransportError

_CHUNK_NBYTES: Final = 1 << 18
_SECONDS: Final = struct.Struct("<d")
_RANK: Final = struct.Struct("<i")


def exchange(
    addresses: Sequence[str],
    rank: int,
    *,
    nbytes: int,
    port: int,
    timeout_seconds: float = 120.0,
) -> float:
    """Times an exchange in which every rank sends `nbytes` and receives `nbytes`.

    All ranks call it together. The streams run for three times as long as asked, and the middle
    third is what counts: by then the token buckets of the links are drained and TCP has found its
    pace, and no stream has finished yet and left the link to fewer than all.

    Args:
        addresses: Where each rank listens, in rank order.
        rank: The caller's place in `addresses`.
        nbytes: Bytes that each rank receives in the timed third, evenly spread over the others.
        port: Rank r listens on ``port + r``.
        timeout_seconds: Bound on every wait, for a peer as for the bytes.

    Returns:
        Seconds of the slowest rank, the same number on all ranks.

    Raises:
        SpecError: There is only one rank.
        TransportError: A peer is missing, leaves, or is silent for longer than the bound.

    Cost:
        Three times ``nbytes`` over the goodput, and two threads per peer; holds no more than half a
        megabyte per peer.
    """
    if len(addresses) < 2:
        raise SpecError("An exchange needs at least two ranks; there is no link to measure.")
    deadline = time.monotonic() + timeout_seconds
    share = max(nbytes // (len(addresses) - 1), 1)
    peers: dict[int, socket.socket] = {}
    try:
        _connect(addresses, rank, port, deadline, peers)
        _tell_all(peers, 0.0)  # nobody starts before everybody is there
        seconds = _stream(peers, share)
        return max([seconds, *_tell_all(peers, seconds)])
    except OSError as error:
        raise TransportError(
            f"Rank {rank} of {len(addresses)} could not measure the goodput of its link "
            f"({nbytes} bytes, port {port}): {error}. All ranks must call it together, and "
            "reach one another at the addresses given."
        ) from error
    finally:
        for connection in peers.values():
            connection.close()


def _connect(
    addresses: Sequence[str],
    rank: int,
    port: int,
    deadline: float,
    peers: dict[int, socket.socket],
) -> None:
    with socket.create_server((addresses[rank], port + rank)) as server:
        for peer in range(rank):
            peers[peer] = _dial((addresses[peer], port + peer), deadline)
            peers[peer].sendall(_RANK.pack(rank))
        while len(peers) < len(addresses) - 1:
            server.settimeout(_left(deadline))
            connection, _ = server.accept()
            connection.settimeout(_left(deadline))
            peers[_RANK.unpack(_receive(connection, _RANK.size))[0]] = connection
    for connection in peers.values():
        connection.settimeout(_left(deadline))


def _dial(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_left(deadline))
        except ConnectionRefusedError:  # the peer is still starting
            _left(deadline)
            time.sleep(0.01)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("a peer did not come in time")
    return left


def _tell_all(peers: dict[int, socket.socket], value: float) -> list[float]:
    for connection in peers.values():
        connection.sendall(_SECONDS.pack(value))
    return [_SECONDS.unpack(_receive(peer, _SECONDS.size))[0] for peer in peers.values()]


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionError("a peer closed the connection")
        received += part
    return received


class _MiddleThird:
    """Times the middle third of all bytes that come in, over all peers."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._received_nbytes = 0
        self._lock = threading.Lock()
        self._times: list[float] = []

    def add(self, nbytes: int) -> None:
        """Counts bytes; any thread may."""
        with self._lock:
            self._received_nbytes += nbytes
            while self._received_nbytes * 3 >= self._nbytes * (len(self._times) + 1):
                self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return self._times[1] - self._times[0]


def _stream(peers: dict[int, socket.socket], share: int) -> float:
    """Sends and receives three times `share` bytes per peer; seconds of the middle third."""
    middle = _MiddleThird(3 * share * len(peers))
    failures: list[OSError] = []

    def send(connection: socket.socket) -> None:
        chunk = memoryview(bytes(_CHUNK_NBYTES))
        left = 3 * share
        while left > 0:
            left -= connection.send(chunk[:left])

    def receive(connection: socket.socket) -> None:
        chunk = memoryview(bytearray(_CHUNK_NBYTES))
        left = 3 * share
        while left > 0:
            got = connection.recv_into(chunk[:left])
            if got == 0:
                raise ConnectionError("a peer closed the connection")
            middle.add(got)
            left -= got

    def guarded(work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        try:
            work(connection)
        except OSError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work, connection), daemon=True)
        for connection in peers.values()
        for work in (send, receive)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return middle.seconds


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cgx.testbed.stream", description=__doc__)
    parser.add_argument("--addresses", required=True, help="one per rank, with commas between")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--nbytes", type=int, required=True, help="bytes each rank sends")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timeout-seconds", type=float, default=120.0)
    options = parser.parse_args()
    seconds = exchange(
        options.addresses.split(","),
        options.rank,
        nbytes=options.nbytes,
        port=options.port,
        timeout_seconds=options.timeout_seconds,
    )
    sys.stdout.write(f"{seconds!r}\n")


if __name__ == "__main__":
    _main()
