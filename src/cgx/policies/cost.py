"""How long a reduction takes: a model of link and processor, filled in by measurements of both.

A step over the link takes ``latency + bytes * seconds per byte``. A compressed reduction goes through a pipeline of
pieces in which the codec of one piece works while others travel: it takes the longer of both, and of the shorter what
the first and the last piece cannot hide.

References:
    Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems (arXiv 2103.00543).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from cgx.core.algorithm import Algorithm, cost


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A straight line: ``fixed_s + byte_s * nbytes`` seconds."""

    fixed_s: float
    byte_s: float

    def seconds(self, nbytes: float) -> float:
        """Time of ``nbytes``."""
        return self.fixed_s + self.byte_s * nbytes

    @property
    def bit_s(self) -> float:
        """Bits per second of a long message."""
        return 8 / self.byte_s


@final
@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Seconds per element of one thread of execution, as it runs beside the other ranks of its machine."""

    encode_s: float
    decode_s: float


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What the probe found: of all ranks the slowest, so equal on all.

    Args:
        world_size: Ranks.
        ranks_per_node: Ranks on each node where there is a hierarchy, else 1.
        exact: The engine's own all-reduce, over raw bytes.
        exact_busy: What part of it keeps a processor busy, 0 to 1; the rest is waiting for the link.
        flat: A step in which a rank sends bytes to all others evenly.
        intra: The same among the ranks of a node; None without a hierarchy.
        inter: The same among ranks of different nodes, all ranks of a node at once; None without a hierarchy.
        fixed_s: A compressed reduction of next to nothing, by algorithm: its latencies and its Python.
        codecs: By the spec's text.
    """

    world_size: int
    ranks_per_node: int
    exact: Line
    exact_busy: float
    flat: Line
    intra: Line | None
    inter: Line | None
    fixed_s: Mapping[Algorithm, float]
    codecs: Mapping[str, CodecSpeed]


@final
@dataclass(frozen=True, slots=True)
class Work:
    """One flat buffer to reduce.

    Args:
        numel: Elements.
        raw_nbytes: Their bytes.
        copy_nbytes: Bytes of one compressed copy.
        pieces: Pieces it is cut in.
    """

    numel: int
    raw_nbytes: int
    copy_nbytes: float
    pieces: int


PIECE_SECONDS = 3e-4  # Python and thread switches that one more piece costs (docs/adr/0004)


def exact_seconds(measured: Measured, raw_nbytes: float) -> float:
    """Time of the engine's uncompressed all-reduce."""
    return measured.exact.seconds(raw_nbytes)


def exact_floor_seconds(measured: Measured, raw_nbytes: float) -> float:
    """Time below which no uncompressed all-reduce of ``raw_nbytes`` can stay: its bytes on the wire, nothing else."""
    world = measured.world_size
    return min(measured.exact.byte_s * raw_nbytes, measured.flat.byte_s * 2 * (world - 1) / world * raw_nbytes)


def wire_seconds(measured: Measured, algorithm: Algorithm, work: Work) -> float:
    """Time that the payload bytes of a compressed reduction take on the links, without latencies."""
    price = cost(
        algorithm,
        work.copy_nbytes,
        world_size=measured.world_size,
        ranks_per_node=measured.ranks_per_node,
        intra_copy_nbytes=work.raw_nbytes,
    )
    if algorithm != "hierarchical" or measured.intra is None or measured.inter is None:
        return measured.flat.byte_s * price.nbytes
    inside = price.nbytes - price.host_nbytes / measured.ranks_per_node
    return measured.intra.byte_s * inside + measured.inter.byte_s * (price.nbytes - inside)


def codec_seconds(measured: Measured, algorithm: Algorithm, spec: str, work: Work) -> float:
    """Processor time of encoding, summing and decoding on one rank."""
    speed, world = measured.codecs[spec], measured.world_size
    match algorithm:
        case "all_gather":
            passes = (1.0, float(world))
        case "scatter_reduce" | "ring":
            passes = (1.0, 2 * (world - 1) / world + 1 / world)
        case "hierarchical":
            # Inside a node the elements are only added: about a decode each way.
            passes = (1.0 / measured.ranks_per_node, 2.0 + 1.0 / measured.ranks_per_node)
    encodes, decodes = passes
    return work.numel * (encodes * speed.encode_s + decodes * speed.decode_s)


def compressed_seconds(measured: Measured, algorithm: Algorithm, spec: str, work: Work) -> float:
    """Predicted time of a compressed reduction that nothing overlaps with.

    Args:
        measured: What the probe found.
        algorithm: Which one; must be among ``measured.fixed_s``.
        spec: Text of the spec; must be among ``measured.codecs``.
        work: What to reduce.
    """
    wire = wire_seconds(measured, algorithm, work)
    codec = codec_seconds(measured, algorithm, spec, work)
    pieces = max(1, work.pieces)
    return measured.fixed_s[algorithm] + (pieces - 1) * PIECE_SECONDS + max(wire, codec) + min(wire, codec) / pieces
