r"""Where does it pay? Predicted gain of `uniform:4` over fp32 and over 16 bits for set-ups people have.

The same cost model as `how="auto"` uses (`cgx.policies`), over a step in which buckets are reduced while the backward
pass runs. Every number that goes in stands in the table or below; nothing is fitted to the result.

    python benchmarks/where_it_pays.py            # prints the table as Markdown
    python benchmarks/where_it_pays.py --check benchmarks/results/train.jsonl   # against what was measured
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from cgx.core.algorithm import Algorithm
from cgx.policies.cost import CodecSpeed, Line, Measured, Work, codec_seconds, compressed_seconds, exact_seconds
from cgx.policies.step import evenly, exposed_seconds

SPEC, BITS = "uniform:4", 4.27
BUCKET_NBYTES = 25e6
BACKWARD_SHARE = 2 / 3  # of a training step's arithmetic: gradients of inputs and of weights beside the forward pass
GOODPUT = 0.95  # of a link's rate, TCP over Ethernet
LATENCY_S = {"ethernet": 2e-4, "internet": 2e-2, "pcie": 3e-5, "rdma": 2e-5}
# Seconds per element. One core of a 2023 server: `cgx bench kernels` (12 GB/s in, 21 GB/s out). A GPU moves a pass's
# bytes (4 in, 0.5 out) through its memory; half of an RTX 3090's 936 GB/s is assumed, for kernels yet to come.
CODEC = {"CPU core": CodecSpeed(3.3e-10, 1.9e-10), "GPU": CodecSpeed(9.6e-12, 9.6e-12)}


@final
@dataclass(frozen=True)
class Setup:
    """One row.

    Args:
        who: Whom it describes.
        model: Its name.
        params: Elements of the gradient.
        step_s: A step's arithmetic on one rank, without communication, all micro-batches together.
        last_share: Part of it that is the last micro-batch, whose backward pass overlaps with communication.
        ranks: Ranks.
        local: Ranks on each node.
        link_bit_s: Rate of each node's network card, or of each card's bus when there is one node.
        kind: Sets the latency.
        codec: Where the codec runs.
        source: Where ``step_s`` comes from.
    """

    who: str
    model: str
    params: float
    step_s: float
    last_share: float
    ranks: int
    local: int
    link_bit_s: float
    kind: Literal["ethernet", "internet", "pcie", "rdma"]
    codec: Literal["CPU core", "GPU"]
    source: str


SETUPS = (
    Setup("two office PCs", "GPT 27 M", 27.2e6, 0.35, 1.0, 2, 1, 1e9, "ethernet", "CPU core", "measured here"),
    Setup(
        "two office PCs, 100 Mbit", "GPT 27 M", 27.2e6, 0.35, 1.0, 2, 1, 1e8, "ethernet", "CPU core", "measured here"
    ),
    Setup(
        "the same, accumulating 8", "GPT 27 M", 27.2e6, 2.8, 1 / 8, 2, 1, 1e9, "ethernet", "CPU core", "measured here"
    ),
    Setup("8 CPU servers", "ResNet-50", 25.6e6, 2.0, 1.0, 8, 1, 1e10, "ethernet", "CPU core", "assumed"),
    Setup("8 CPU servers, 1 GbE", "ResNet-50", 25.6e6, 2.0, 1.0, 8, 1, 1e9, "ethernet", "CPU core", "assumed"),
    Setup("2 homes over 50 Mbit", "GPT-2 124 M", 124e6, 20.0, 1 / 16, 2, 1, 5e7, "internet", "CPU core", "assumed"),
    Setup("2 nodes of 4 RTX 3090, 1 GbE", "GPT-2 124 M", 124e6, 0.60, 1.0, 8, 4, 1e9, "ethernet", "GPU", "assumed"),
    Setup("2 nodes of 4 RTX 3090, 10 GbE", "GPT-2 124 M", 124e6, 0.60, 1.0, 8, 4, 1e10, "ethernet", "GPU", "assumed"),
    Setup("4 nodes of 8, 25 GbE", "ViT-L 304 M", 304e6, 0.45, 1.0, 32, 8, 2.5e10, "rdma", "GPU", "assumed"),
    Setup("4 nodes of 8, 100 GbE", "ViT-L 304 M", 304e6, 0.45, 1.0, 32, 8, 1e11, "rdma", "GPU", "assumed"),
    Setup(
        "two PCs, a small network", "MLP 0.1 M", 1e5, 0.0007, 1.0, 2, 1, 1e10, "ethernet", "CPU core", "measured here"
    ),
)


def measured_of(setup: Setup) -> Measured:
    """What a probe would find."""
    wire = Line(LATENCY_S[setup.kind], 8 / (GOODPUT * setup.link_bit_s))
    latency, world, local = wire.fixed_s, setup.ranks, setup.local
    between = world > local
    # Ranks of a node share its card in flat algorithms; the engine's ring crosses it once.
    flat = Line(latency, wire.byte_s * (local * (world - local) / (world - 1) if between else 1.0))
    return Measured(
        world_size=world,
        ranks_per_node=local if between else 1,
        exact=Line(2 * (world - 1) * latency, 2 * (world - 1) / world * wire.byte_s),
        exact_busy=0.0,
        flat=flat,
        intra=Line(3e-5, 8 / 1e11),
        inter=Line(latency, wire.byte_s * local),
        fixed_s={
            "scatter_reduce": 2 * latency + 5e-4,
            "all_gather": latency + 3e-4,
            "hierarchical": 4 * latency + 8e-4,
        },
        codecs={SPEC: CODEC[setup.codec]},
    )


def step_seconds(setup: Setup, how: Literal["fp32", "16 bits", "uniform:4"]) -> float:
    """Predicted seconds of a step, the last bucket's reduction always exposed."""
    found, raw = measured_of(setup), 4 * setup.params
    count = max(1, round(raw / BUCKET_NBYTES))
    sizes = [raw / count] * count
    works: list[Work] = []
    match how:
        case "fp32":
            seconds = [exact_seconds(found, size) for size in sizes]
        case "16 bits":
            seconds = [exact_seconds(found, size / 2) for size in sizes]
        case "uniform:4":
            algorithms: Sequence[Algorithm] = [
                a for a in found.fixed_s if a != "hierarchical" or found.ranks_per_node > 1
            ]
            works = [
                Work(round(size / 4), round(size), size / 32 * BITS, pieces=max(1, round(size / 2e6))) for size in sizes
            ]
            seconds = [min(compressed_seconds(found, a, SPEC, work) for a in algorithms) for work in works]
    backward = setup.step_s * setup.last_share * BACKWARD_SHARE
    # On a CPU the codec takes the processor from the model; on a GPU its share of the memory's bandwidth is small.
    taken = (
        sum(codec_seconds(found, "scatter_reduce", SPEC, work) for work in works) if setup.codec == "CPU core" else 0.0
    )
    return setup.step_s + taken + exposed_seconds(backward, evenly(backward, sizes, seconds))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(bit_s: float) -> str:
    return f"{bit_s / 1e9:g} Gbit/s" if bit_s >= 1e9 else f"{bit_s / 1e6:g} Mbit/s"


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| who | model | ranks | link | compute a step | fp32 | 16 bits | `uniform:4` | over fp32 | over 16 bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setup in SETUPS:
        fp32, half, ours = (step_seconds(setup, how) for how in ("fp32", "16 bits", "uniform:4"))  # type: ignore[arg-type]
        nodes = setup.ranks // setup.local
        ranks = f"{nodes} x {setup.local}" if setup.local > 1 and nodes > 1 else f"{setup.ranks}"
        star = "" if setup.codec == "CPU core" else " *"
        cells = [setup.who + star, setup.model, ranks, _rate(setup.link_bit_s), _ms(setup.step_s)]
        cells += [*map(_ms, (fp32, half, ours)), f"{fp32 / ours:.2f}x", f"{half / ours:.2f}x"]
        lines.append(_row(cells))
    return "\n".join([*lines, "", "\\* predicted for CUDA kernels that this version does not have yet."])


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def check(path: Path) -> str:
    """Predictions for the rows of `cgx bench train --json` beside what was measured."""
    lines = ["| model | link | how | measured | predicted | off by |", "|---|---|---|---|---|---|"]
    for line in path.read_text().splitlines():
        row = json.loads(line)
        how = {"off": "fp32", "ddp-fp16": "16 bits", "uniform:4": "uniform:4"}.get(row.get("how", ""))
        if how is None or row["link"] == "none" or row["accumulate"] != 1:
            continue
        rate = {"1gbit": 1e9, "100mbit": 1e8, "10gbit": 1e10}[row["link"].split()[0]]
        ranks = row["hosts"] * row["ranks_per_host"]
        setup = Setup("", row["model"], row["params"], row["compute_p50_s"], 1.0, ranks, row["ranks_per_host"], rate,
                      "ethernet", "CPU core", "measured")  # fmt: skip
        predicted, found = step_seconds(setup, how), row["step_p50_s"]  # type: ignore[arg-type]
        off_by = f"{predicted / found - 1:+.0%}"
        lines.append(_row([row["model"], row["link"], row["how"], _ms(found), _ms(predicted), off_by]))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=Path, help="JSON lines of `cgx bench train --json`")
    asked = parser.parse_args()
    print(check(asked.check) if asked.check else table())
