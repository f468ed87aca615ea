"""The laws of a transport, over threads and over threads behind a modelled link."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from cgx.errors import CollectiveTimeoutError, PeerLostError, SpecError, WireError
from cgx.transports.base import Bytes, Channel, Transport
from cgx.transports.threads import ThreadHub
from cgx.transports.throttled import ModelledLink, ThrottledTransport
from tests.harness import run_threads

WORLD = 3
Lanes = Callable[[int], Transport]
SECONDS = 0.3  # a hub's patience where a test waits for it to end


def plain(hub: ThreadHub) -> Lanes:
    """Return the ends of a hub."""
    return hub.transport


def throttled(hub: ThreadHub) -> Lanes:
    """Return the ends of a hub, each behind a fast link of its own."""
    return lambda rank: ThrottledTransport(hub.transport(rank), ModelledLink(1e12))


kinds = pytest.mark.parametrize("kind", [plain, throttled])


def message(sender: int, receiver: int, number: int, size: int = 16) -> Bytes:
    """Return bytes that say where they come from."""
    return np.full(size, 64 * sender + 8 * receiver + number, np.uint8)


@kinds
def test_all_to_all_brings_each_message_to_its_rank_and_keeps_the_order_of_each_channel(kind: Callable) -> None:
    lanes = kind(ThreadHub(WORLD))

    def run(rank: int) -> None:
        lane = lanes(rank)
        assert (lane.rank, lane.world_size) == (rank, WORLD)
        works = []
        for number, channel in enumerate([Channel.BODY, Channel.SIZES, Channel.BODY, Channel.TICKET]):
            send = [message(rank, peer, number) for peer in range(WORLD)]
            recv = [np.zeros(16, np.uint8) for _ in range(WORLD)]
            works.append((number, recv, lane.all_to_all(send, recv, channel)))
        # Waited for in another order than posted: only channels keep an order.
        for number, recv, work in [works[3], works[0], works[1], works[2]]:
            work.wait()
            for peer in set(range(WORLD)) - {rank}:
                assert (recv[peer] == message(peer, rank, number)).all()
            assert not recv[rank].any(), "nothing comes from oneself"
        assert lane.sent_nbytes == 4 * (WORLD - 1) * 16

    run_threads(WORLD, run)


@kinds
def test_nothing_is_sent_to_or_awaited_from_ranks_without_a_buffer(kind: Callable) -> None:
    lanes = kind(ThreadHub(WORLD, timeout_seconds=SECONDS))

    def run(rank: int) -> None:
        lane = lanes(rank)
        empty = np.empty(0, np.uint8)
        recv = np.zeros(8, np.uint8)
        send = [None, message(0, 1, 0, 8), empty] if rank == 0 else [None] * WORLD
        lane.all_to_all(send, [recv if rank == 1 else None, None, empty], Channel.BODY).wait()
        assert recv.any() == (rank == 1)
        assert lane.sent_nbytes == (8 if rank == 0 else 0)

    run_threads(WORLD, run)


@kinds
def test_all_gather_brings_everybody_the_same_and_takes_unequal_sizes(kind: Callable) -> None:
    lanes = kind(ThreadHub(WORLD))

    def run(rank: int) -> None:
        lane = lanes(rank)
        recv = [None if peer == rank else np.zeros(8 * (peer + 1), np.uint8) for peer in range(WORLD)]
        lane.all_gather(message(rank, 0, 1, 8 * (rank + 1)), recv, Channel.BODY).wait()
        for peer in set(range(WORLD)) - {rank}:
            assert (recv[peer] == message(peer, 0, 1, 8 * (peer + 1))).all()
        assert lane.sent_nbytes == (WORLD - 1) * 8 * (rank + 1)

    run_threads(WORLD, run)


@kinds
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.complex64])
def test_all_reduce_sums_in_place(kind: Callable, dtype: type) -> None:
    lanes = kind(ThreadHub(WORLD))

    def run(rank: int) -> None:
        x = np.arange(6).reshape(2, 3).astype(dtype) * (rank + 1)
        lanes(rank).all_reduce(x).wait()
        assert (x == np.arange(6).reshape(2, 3) * 6).all()

    run_threads(WORLD, run)


@kinds
def test_posting_never_blocks_and_a_posted_message_is_the_bytes_of_that_moment(kind: Callable) -> None:
    lanes = kind(ThreadHub(2))
    sender, receiver = lanes(0), lanes(1)
    buffer = np.zeros(4, np.uint8)
    for number in range(100):  # nobody receives yet
        buffer[:] = number
        sender.all_to_all([None, buffer], [None, None], Channel.BODY).wait()
    got = np.zeros(4, np.uint8)
    for number in range(100):
        receiver.all_to_all([None, None], [got, None], Channel.BODY).wait()
        assert (got == number).all()


@kinds
@pytest.mark.parametrize("channel", Channel)
def test_a_closed_lane_tells_all_who_wait_for_it_who_it_was(kind: Callable, channel: Channel) -> None:
    lanes = kind(ThreadHub(WORLD, timeout_seconds=10))

    def run(rank: int) -> None:
        lane = lanes(rank)
        if rank == 1:
            lane.close()
            return
        recv = [None, np.zeros(4, np.uint8), None]
        for _ in range(2):  # and tells them again
            with pytest.raises(PeerLostError, match="from rank 1"):
                lane.all_to_all([None] * WORLD, recv, channel).wait()

    run_threads(WORLD, run)


@kinds
def test_what_was_sent_before_a_lane_closed_still_arrives(kind: Callable) -> None:
    lanes = kind(ThreadHub(2, timeout_seconds=10))
    lanes(0).all_to_all([None, message(0, 1, 3)], [None, None], Channel.BODY)
    lanes(0).close()
    recv = np.zeros(16, np.uint8)
    lanes(1).all_to_all([None, None], [recv, None], Channel.BODY).wait()
    assert (recv == message(0, 1, 3)).all()


@kinds
def test_a_silent_peer_is_a_timeout_that_names_it(kind: Callable) -> None:
    lanes = kind(ThreadHub(2, timeout_seconds=SECONDS))
    work = lanes(0).all_to_all([None, None], [None, np.zeros(4, np.uint8)], Channel.BODY)
    with pytest.raises(CollectiveTimeoutError, match="from rank 1"):
        work.wait()


@kinds
@pytest.mark.parametrize("sent_nbytes", [8, 24])
def test_a_message_of_another_size_is_refused(kind: Callable, sent_nbytes: int) -> None:
    lanes = kind(ThreadHub(2, timeout_seconds=SECONDS))
    lanes(0).all_to_all([None, np.zeros(sent_nbytes, np.uint8)], [None, None], Channel.BODY)
    work = lanes(1).all_to_all([None, None], [np.zeros(16, np.uint8), None], Channel.BODY)
    with pytest.raises(WireError, match=f"rank 0 sent {sent_nbytes} bytes where 16"):
        work.wait()


def test_a_modelled_link_is_never_faster_than_it_says_and_all_lanes_share_it() -> None:
    bit_s, nbytes, times = 8e6, 20_000, 3  # 20 ms a message
    hubs = [ThreadHub(2) for _ in range(2)]

    def run(rank: int) -> float:
        link = ModelledLink(bit_s)
        lanes = [ThrottledTransport(hub.transport(rank), link) for hub in hubs]
        start = time.monotonic()
        works = []
        for _ in range(times):
            for lane in lanes:
                send = [None if peer == rank else np.zeros(nbytes, np.uint8) for peer in range(2)]
                recv = [None if peer == rank else np.zeros(nbytes, np.uint8) for peer in range(2)]
                works.append(lane.all_to_all(send, recv, Channel.BODY))
        for work in works:
            work.wait()
        assert sum(lane.sent_nbytes for lane in lanes) == len(works) * nbytes
        return time.monotonic() - start

    seconds = run_threads(2, run)
    assert min(seconds) >= 2 * times * nbytes * 8 / bit_s


def test_an_uncompressed_all_reduce_pays_for_its_bytes_on_a_modelled_link() -> None:
    hub = ThreadHub(2)

    def run(rank: int) -> float:
        lane = ThrottledTransport(hub.transport(rank), ModelledLink(8e6))
        start = time.monotonic()
        lane.all_reduce(np.zeros(10_000, np.float32)).wait()
        return time.monotonic() - start

    assert min(run_threads(2, run)) >= 40_000 * 8 / 8e6


@pytest.mark.parametrize("bit_s", [0.0, -1.0, float("nan")])
def test_a_link_without_a_rate_is_refused(bit_s: float) -> None:
    with pytest.raises(SpecError, match="above zero bits per second"):
        ModelledLink(bit_s)
