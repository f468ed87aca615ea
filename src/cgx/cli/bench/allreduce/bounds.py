r"""How far each algorithm's result may be off, from what its codecs guarantee.

`fidelity.allowed_nmse` knows one scheme: ranks' parts are encoded, their mean loses at most the mean of the losses, and
phase two encodes it once more. The other algorithms encode other things, and each is that scheme with other parts.
Write L(x) for the largest loss of encoding x in phase one; L(c x) = c L(x).

*all_gather* encodes every rank's part, the receiver's own too, and adds what they decode to: there is no phase two.

*hierarchical* adds exactly inside a node and encodes the nodes' sums. With H nodes of R ranks (W = H R) the mean loses
sum L(s_n) / W = mean over nodes of L(s_n / R): the parts are the nodes' means.

*ring* encodes partial sums. Let S_k be the exact sum of the first k ranks on a chunk's way and E_k the loss that has
piled up in it. Hop k encodes S_k plus E_(k-1). An error of e at both ends of a block widens its range by 2 e, so its
steps by 2 e / (2**bits - 1), and the loss by w e where w = 2 error_bound / (2**bits - 1); a codec that loses a share c
of the squared norm loses w = sqrt(c) of it. Hence

    E_k <= (1 + w) E_(k-1) + L(S_k),   E_(W-1) <= sum over k < W of (1 + w)**(W - 1 - k) L(S_k),

and the mean loses E_(W-1) / W. That is the mean loss of the W - 1 parts (W - 1) / W (1 + w)**(W - 1 - k) S_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from cgx.cli.bench.fidelity import Floats, allowed_nmse, runs, widening
from cgx.core.segments import Segment
from cgx.core.spec import Identity, PhaseSpecs

_MakeRun = Callable[[int, slice], Floats]


@final
@dataclass(frozen=True)
class Input:
    """What is reduced.

    Attributes:
        name: Of the parameter; with its shape it decides which rank owns which elements.
        numel: Elements.
        world_size: Ranks.
        ranks_per_host: Ranks on each host, numbered host by host.
        make_run: Makes the elements of a rank that a slice of `runs` names.
    """

    name: str
    numel: int
    world_size: int
    ranks_per_host: int
    make_run: _MakeRun


def allowed(algorithm: str, specs: PhaseSpecs, given: Input, mean: NDArray[np.float64]) -> float:
    """Largest relative squared error that a correct reduction can have.

    Args:
        algorithm: The reducer's name.
        specs: Specs of both phases.
        given: What is reduced.
        mean: Its mean in double precision, shape (numel,).

    Cost:
        Memory for some copies of one rank's elements, whatever the number of ranks. W - 1 times as many passes for
        ring as for the others.
    """
    world = range(given.world_size)
    match algorithm:
        case "scatter_reduce":
            return allowed_nmse(specs, (_whole(given, [rank]) for rank in world), mean)
        case "all_gather":
            once = PhaseSpecs(specs.scatter, Identity())
            return allowed_nmse(once, (_whole(given, [rank]) for rank in world), mean)
        case "hierarchical":
            size = given.ranks_per_host
            nodes = (world[first : first + size] for first in range(0, given.world_size, size))
            return allowed_nmse(specs, (_whole(given, node) / np.float32(size) for node in nodes), mean)
        case "ring":
            return allowed_nmse(specs, _ring_parts(specs, given), mean)
        case _:
            raise ValueError(f"no bound is known for {algorithm}")


def _whole(given: Input, ranks: list[int] | range) -> Floats:
    """Sum of some ranks' elements."""
    total = np.zeros(given.numel, np.float32)
    for run in runs(given.numel):
        for rank in ranks:
            total[run] += given.make_run(rank, run)
    return total


def _ring_parts(specs: PhaseSpecs, given: Input) -> Iterator[Floats]:
    world = given.world_size
    segment = Segment(given.name, (given.numel,), "fp32", specs)
    owners = segment.owners(world)
    growth = 1 + widening(PhaseSpecs(specs.scatter, specs.scatter))
    for hops in range(1, world):
        partial = np.empty(given.numel, np.float32)
        for run in runs(given.numel):
            stripes = owners[run.start // segment.stripe_numel : -(-run.stop // segment.stripe_numel)]
            owner = np.repeat(stripes, segment.stripe_numel)[: run.stop - run.start]
            partial[run] = 0
            for rank in range(world):
                # The chunk of owner r meets the ranks r + 1, r + 2, ..., r.
                met = (rank - owner - 1) % world < hops
                partial[run][met] += given.make_run(rank, run)[met]
        yield partial * np.float32((world - 1) / world * growth ** (world - 1 - hops))
