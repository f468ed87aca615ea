"""The laws of a transport over Gloo: two private lanes, as sessions open them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cgx.errors import CollectiveTimeoutError, PeerLostError, TransportError
from cgx.torch.compat import new_lane
from cgx.transports.base import Bytes, Channel
from cgx.transports.process_group import ProcessGroupTransport
from tests.harness import outcomes_of, run_processes

WORLD = 3
SHORT_SECONDS = 2.0


def open_lane(timeout_seconds: float = 20.0) -> ProcessGroupTransport:
    """Return this rank's end of a lane over the default group."""
    assert dist.group.WORLD is not None
    return ProcessGroupTransport(new_lane(dist.group.WORLD), timeout_seconds=timeout_seconds)


def message(sender: int, receiver: int, number: int, size: int = 16) -> Bytes:
    """Return bytes that say where they come from."""
    return np.full(size, 64 * sender + 8 * receiver + number, np.uint8)


def ordered(rank: int) -> None:
    """Channels keep their order each, whatever is waited for first; lanes do not mix."""
    lanes = [open_lane(), open_lane()]
    works = []
    for number, channel in enumerate([Channel.BODY, Channel.SIZES, Channel.BODY, Channel.TICKET]):
        for index, lane in enumerate(lanes):
            send = [message(rank, peer, number + 4 * index) for peer in range(WORLD)]
            send[rank] = None
            recv = [None if peer == rank else np.zeros(16, np.uint8) for peer in range(WORLD)]
            works.append((number + 4 * index, recv, lane.all_to_all(send, recv, channel)))
    for number, recv, work in reversed(works):
        work.wait()
        for peer in set(range(WORLD)) - {rank}:
            assert (recv[peer] == message(peer, rank, number)).all()
    assert [lane.sent_nbytes for lane in lanes] == 2 * [4 * (WORLD - 1) * 16]
    assert [(lane.rank, lane.world_size) for lane in lanes] == 2 * [(rank, WORLD)]


def unequal(rank: int) -> None:
    """All-gather takes unequal sizes, large ones, and ranks that send nothing."""
    lane = open_lane()
    sizes = [8, 3_000_000, 0]
    recv = [None if peer == rank else np.zeros(size, np.uint8) for peer, size in enumerate(sizes)]
    lane.all_gather(message(rank, 0, 1, sizes[rank]), recv, Channel.BODY).wait()
    for peer in set(range(WORLD)) - {rank}:
        assert (recv[peer] == message(peer, 0, 1, sizes[peer])).all()
    assert lane.sent_nbytes == (WORLD - 1) * sizes[rank]


def summed(rank: int) -> None:
    """The engine's own sum takes tensors of many dtypes, dense and sparse, and arrays."""
    lane = open_lane()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
        x = torch.arange(6).to(dtype) * (rank + 1)
        lane.all_reduce(x).wait()
        assert torch.equal(x, (torch.arange(6) * 6).to(dtype)), dtype
    array = np.arange(6.0) * (rank + 1)
    lane.all_reduce(array).wait()
    assert (array == np.arange(6) * 6).all()
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, rank + 1.0], (8,), check_invariants=True)
    lane.all_reduce(sparse).wait()
    assert sparse.to_dense().tolist() == [1, 1, 1, 0, 0, 6, 0, 0]


def run_ahead(rank: int) -> None:
    """A rank may post much before its peers do; nothing is lost, and posting does not wait for them."""
    lane, store = open_lane(), dist.distributed_c10d._get_default_store()
    buffers = [np.full(1000, number, np.uint8) for number in range(50)]
    if rank == 0:
        works = [lane.all_to_all([None, b, None], [None] * WORLD, Channel.BODY) for b in buffers]
        store.set("posted", "")
        for work in works:
            work.wait()
    if rank == 1:
        store.wait(["posted"])
        for buffer in buffers:
            got = np.zeros(1000, np.uint8)
            lane.all_to_all([None] * WORLD, [got, None, None], Channel.BODY).wait()
            assert (got == buffer).all()


@pytest.mark.parametrize("law", [ordered, unequal, summed, run_ahead])
def test_it_moves_what_it_should(law: Callable[[int], None]) -> None:
    run_processes(law, WORLD)


def closed(rank: int, holds_work: bool) -> None:
    """One rank closes its lane while all wait for it, its own works still in somebody's hands."""
    lane = open_lane(100.0)
    recv = [None if peer == rank else np.zeros(8, np.uint8) for peer in range(WORLD)]
    work = lane.all_to_all([None] * WORLD, recv, Channel.BODY)
    dist.barrier()  # all have connected and posted: who closes before is a peer that does not come
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if not holds_work:
            del work
        lane.close()
        store.wait(["heard 0", "heard 2"])
        return
    only_one = [None, np.zeros(8, np.uint8), None]
    with pytest.raises(PeerLostError, match="rank 1"):  # raised by posting, when the news is quick
        lane.all_to_all([None] * WORLD, only_one, Channel.TICKET).wait()
    store.set(f"heard {rank}", "")
    store.wait(["heard 0", "heard 2"])


@pytest.mark.parametrize("holds_work", [True, False])
def test_a_closed_lane_tells_its_peers_at_once(holds_work: bool) -> None:
    for outcome in outcomes_of(closed, WORLD, holds_work, timeout_seconds=40):
        assert outcome.error is None, outcome.trace
        assert outcome.exit_code == 0


def silent(rank: int) -> float:
    """A peer that posts nothing; the others give up when they said they would."""
    lane, store = open_lane(SHORT_SECONDS), dist.distributed_c10d._get_default_store()
    others = ["gave up 0", "gave up 2"]
    if rank != 1:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1.*timeout of 2 s"):
            lane.all_to_all([None] * WORLD, [None, np.zeros(8, np.uint8), None], Channel.BODY).wait()
        assert time.monotonic() - start >= SHORT_SECONDS * 0.9
        store.set(f"gave up {rank}", "")
    store.wait(others)
    return 0.0


def test_a_silent_peer_is_a_timeout_that_names_it() -> None:
    for outcome in outcomes_of(silent, WORLD, timeout_seconds=40):
        assert outcome.error is None, outcome.trace


def use_after_close(rank: int) -> None:
    lane = open_lane()
    lane.close()
    lane.close()
    for post in (
        lambda: lane.all_to_all([None, np.zeros(8, np.uint8)], [None, np.zeros(8, np.uint8)], Channel.BODY),
        lambda: lane.all_reduce(torch.ones(3)),
    ):
        with pytest.raises(TransportError, match="this lane is closed"):
            post()


def test_a_lane_closed_here_says_so() -> None:
    run_processes(use_after_close, 2)
