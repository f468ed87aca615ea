"""Where ranks are: asked over a lane, and refused when it makes no hierarchy or contradicts the launcher."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cgx.collectives.hierarchical import Hierarchical
from cgx.collectives.nodes import Nodes, find_nodes, host_identity
from cgx.collectives.registry import reducer_for
from cgx.core.algorithm import ALGORITHMS, Algorithm, cost
from cgx.errors import SpecError
from cgx.transports.threads import ThreadHub
from tests.harness import run_threads


def found(hosts: Sequence[str], stated: Sequence[int | None] | None = None) -> Nodes | str:
    """Return what all ranks find, after checking that it is the same."""
    hub = ThreadHub(len(hosts), timeout_seconds=4.0)
    sizes = [None] * len(hosts) if stated is None else stated
    answers = run_threads(
        len(hosts), lambda rank: find_nodes(hub.transport(rank), hosts[rank].ljust(8).encode(), sizes[rank])
    )
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize("stated", [None, [2] * 6, [2, None, 2, 2, None, 2]])
def test_ranks_find_their_nodes_wherever_they_are(stated: Sequence[int | None] | None) -> None:
    nodes = found(["b", "a", "b", "c", "c", "a"], stated)
    assert nodes == Nodes((0, 1, 0, 2, 2, 1), (0, 0, 1, 0, 1, 1), 2)
    assert isinstance(nodes, Nodes)
    assert nodes.count == 3
    assert [nodes.local_peers(rank) for rank in range(3)] == [[0, 2], [1, 5], [0, 2]]
    assert [nodes.column_peers(rank) for rank in (0, 1, 4)] == [[0, 1, 3], [0, 1, 3], [2, 5, 4]]


@pytest.mark.parametrize(
    ("hosts", "stated", "says"),
    [
        ("aaaa", [4] * 4, "all 4 ranks run on one machine"),
        ("a", None, "all 1 ranks run on one machine"),
        ("abc", None, "every rank runs on a machine of its own"),
        ("aabbb", None, r"different numbers of ranks \(2, 3\)"),
        ("aabb", [2, 2, 2, 4], "LOCAL_WORLD_SIZE is 4 on rank 3, but 2 of the group's ranks run on its machine"),
        ("aabb", [1] * 4, "LOCAL_WORLD_SIZE is 1 on rank 0"),
    ],
)
def test_what_is_no_hierarchy_is_said_in_one_sentence_on_every_rank(
    hosts: str, stated: Sequence[int] | None, says: str
) -> None:
    reason = found(hosts, stated)
    assert isinstance(reason, str)
    with pytest.raises(SpecError, match=says):
        reducer_for("hierarchical", nodes=reason)


def test_a_process_knows_its_machine() -> None:
    assert host_identity() == host_identity()
    assert len(host_identity()) == 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_reducer_and_a_cost(algorithm: Algorithm) -> None:
    nodes = Nodes.of("aabb")
    assert (type(reducer_for(algorithm, nodes=nodes)) is Hierarchical) == (algorithm == "hierarchical")
    alone, apart = (cost(algorithm, 100, world_size=w, intra_copy_nbytes=100) for w in (1, 4))
    assert (alone.steps, alone.nbytes, alone.host_nbytes) == (0, 0, 0)
    assert apart.nbytes == apart.host_nbytes > 0
    assert cost(algorithm, 100, world_size=4, ranks_per_node=4, intra_copy_nbytes=100).host_nbytes == 0
    with pytest.raises(SpecError, match="5 ranks are no whole number of nodes of 2 ranks"):
        cost(algorithm, 100, world_size=5, ranks_per_node=2)
