"""Which ranks share a machine: asked of the machines themselves, and checked against what the launcher says."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from cgx.transports.base import Bytes, Channel, Transport

_UNSTATED = 0  # a LOCAL_WORLD_SIZE nobody set


@final
@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the ranks of a group are; all nodes have equally many.

    Ranks that have the same place on their nodes form a *column*.

    Args:
        node_of: Node of each rank; nodes are numbered in the order of their first ranks.
        local_of: Place of each rank on its node, in the order of ranks.
        ranks_per_node: Ranks of every node.

    Example:
        >>> nodes = Nodes.of(["a", "b", "a", "b"])
        >>> nodes.local_peers(2), nodes.column_peers(2)
        ([0, 2], [2, 3])
    """

    node_of: tuple[int, ...]
    local_of: tuple[int, ...]
    ranks_per_node: int

    @staticmethod
    def of(hosts: Sequence[object]) -> Nodes:
        """Nodes from what tells each rank's host from others; as many ranks on each."""
        order = list(dict.fromkeys(hosts))
        node_of = tuple(order.index(host) for host in hosts)
        local_of = tuple(node_of[:rank].count(node) for rank, node in enumerate(node_of))
        return Nodes(node_of, local_of, len(hosts) // len(order))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.node_of) // self.ranks_per_node

    def local_peers(self, rank: int) -> list[int]:
        """The ranks of ``rank``'s node, itself among them, in order of rank."""
        return [peer for peer, node in enumerate(self.node_of) if node == self.node_of[rank]]

    def column_peers(self, rank: int) -> list[int]:
        """The ranks of ``rank``'s column, itself among them, in order of node."""
        column = [peer for peer, local in enumerate(self.local_of) if local == self.local_of[rank]]
        return sorted(column, key=lambda peer: self.node_of[peer])


def host_identity() -> bytes:
    """What ranks share exactly when they share a machine and its network cards: 8 bytes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        words = f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux, or /proc is hidden
        words = f"{socket.gethostname()} {uuid.getnode()}"
    return hashlib.blake2b(words.encode(), digest_size=8).digest()


def find_nodes(lane: Transport, host_identity: bytes, local_world_size: int | None) -> Nodes | str:
    """Asks all ranks where they are; blocks.

    Args:
        lane: Idle on every rank.
        host_identity: 8 bytes, see ``host_identity``.
        local_world_size: Ranks on this machine as the launcher has it; None when it says nothing.

    Returns:
        The nodes or, in one sentence and the same on every rank, why there is no hierarchy to use.

    Raises:
        TransportError: A peer is gone or silent.

    Cost: one step of 16 bytes to every other rank.
    """
    mine = np.empty(16, np.uint8)
    mine[:8] = np.frombuffer(host_identity, np.uint8)
    mine[8:].view(np.int64)[0] = local_world_size or _UNSTATED
    heard: list[Bytes | None] = [np.empty(16, np.uint8) if r != lane.rank else None for r in range(lane.world_size)]
    lane.all_gather(mine, heard, Channel.CONTROL).wait()
    words = [mine if word is None else word for word in heard]
    return _judge([bytes(word[:8]) for word in words], [int(word[8:].view(np.int64)[0]) for word in words])


def _judge(hosts: Sequence[bytes], stated: Sequence[int]) -> Nodes | str:
    sizes = {host: hosts.count(host) for host in hosts}
    for rank, (host, size) in enumerate(zip(hosts, stated, strict=True)):
        if size not in (_UNSTATED, sizes[host]):
            return (
                f"LOCAL_WORLD_SIZE is {size} on rank {rank}, but {sizes[host]} of the group's ranks run on its machine"
            )
    if len(sizes) == 1:
        return f"all {len(hosts)} ranks run on one machine"
    if len(sizes) == len(hosts):
        return "every rank runs on a machine of its own"
    if len(set(sizes.values())) > 1:
        counts = ", ".join(map(str, sizes.values()))
        return f"the machines have different numbers of ranks ({counts})"
    return Nodes.of(hosts)
