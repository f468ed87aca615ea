"""Does `how="auto"` follow the link? Two emulated hosts train while their link goes from 1 Gbit to 10 Gbit to 50 Mbit.

Prints, for each change, after how many steps the choice was settled again and what it then was; the decisions with
their reasons; and whether the replicas stayed bit-identical. Exits with 1 when they did not, or when a change took more
than 50 steps. Needs network namespaces.

    python benchmarks/link_change.py --model gpt-27m --plot benchmarks/results/link-change.png
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cgx.testbed import Hosts, parse_rate

LINKS = ("1gbit", "10gbit", "50mbit")
STEPS = 70  # on each link
ALLOWED_STEPS = 50
HASH_EVERY = 10


def work(model_name: str, steps: int) -> None:
    """One rank: trains and tells, a line a step, what it did."""
    import torch
    import torch.distributed as dist

    from cgx.cli.bench.train.replica import Replica
    from cgx.cli.bench.train.workloads import WORKLOADS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    workload = WORKLOADS[model_name]
    batches = [workload.make_batch(torch.Generator().manual_seed(dist.get_rank()), workload.batch)]
    replica = Replica(workload, "auto")
    assert replica.handle is not None
    for step in range(steps):
        start = time.perf_counter()
        replica.step(batches)
        seconds = time.perf_counter() - start
        auto = replica.handle.report().auto
        line: dict[str, Any] = {"step": step, "seconds": seconds, "choice": auto.choice, "settled": auto.is_settled}
        line["history"] = list(auto.history)
        if step % HASH_EVERY == HASH_EVERY - 1:
            line["digest"] = hashlib.sha256(replica.digest().encode()).hexdigest()
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        dist.barrier()
    replica.close()
    dist.destroy_process_group()


def watch(model_name: str) -> tuple[list[dict[str, Any]], bool]:
    """Trains on two hosts, changes the link on the way; the lines of rank 0, and whether replicas stayed alike."""
    rows: list[dict[str, Any]] = []
    digests: dict[int, set[str]] = {}
    steps = STEPS * len(LINKS)
    with Hosts(2, parse_rate(LINKS[0])) as hosts:
        argv = [__file__, "--model", model_name, "--work", str(steps)]
        with hosts.torchrun(argv) as job:
            lines = (json.loads(line.text) | {"host": line.host} for line in job.lines(timeout_seconds=1800))
            for row in track(lines, total=2 * steps, description="training", console=Console(stderr=True)):
                if "digest" in row:
                    digests.setdefault(row["step"], set()).add(row["digest"])
                if row["host"] == 0:
                    rows.append(row)
                    if (row["step"] + 1) % STEPS == 0 and row["step"] + 1 < steps:
                        for host in range(2):
                            hosts.set_rate(host, parse_rate(LINKS[(row["step"] + 1) // STEPS]))
    return rows, all(len(found) == 1 for found in digests.values())


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, int | None, str, float]]:
    """By link: steps until the choice was settled for good (None: none was made on it), the choice, the median step."""
    found = []
    decided = {index for index in range(len(LINKS)) if any(_is_in(line, index) for line in rows[-1]["history"])}
    for index, link in enumerate(LINKS):
        part = rows[index * STEPS : (index + 1) * STEPS]
        last = part[-1]
        changed = [i for i, row in enumerate(part) if row["choice"] != last["choice"] or not row["settled"]]
        seconds = sorted(row["seconds"] for row in part[-STEPS // 4 :])
        steps = changed[-1] + 1 if changed else 0
        found.append((link, steps if index in decided else None, last["choice"], seconds[len(seconds) // 2]))
    return found


def _is_in(line: str, index: int) -> bool:
    """Whether a line of the history tells of a decision among the steps on link number ``index``."""
    number = re.match(r"step (\d+): .* a step", line)
    return number is not None and index * STEPS <= int(number[1]) < (index + 1) * STEPS


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Step time over steps, coloured by what was in use."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for choice, colour in (("off", "tab:gray"), ("uniform:8", "tab:orange"), ("uniform:4", "tab:blue")):
        for settled, marker in ((True, "o"), (False, "x")):
            part = [row for row in rows if row["choice"] == choice and row["settled"] is settled]
            label = choice if settled else f"{choice}, on trial"
            if part:
                axes.plot(
                    [r["step"] for r in part], [r["seconds"] for r in part], marker, color=colour, ms=4, label=label
                )
    for index, link in enumerate(LINKS):
        axes.axvline(index * STEPS, color="black", lw=0.6)
        axes.text(index * STEPS + 1, 1.02, link, transform=axes.get_xaxis_transform())
    axes.set(xlabel="step", ylabel="seconds per step", yscale="log")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Runs the benchmark and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-27m")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.model, asked.work)
        return 0
    rows, is_identical = watch(asked.model)
    console = Console()
    table = Table("link", "settled after", "choice", "median step", title=f"{asked.model}, 2 hosts, how='auto'")
    found = summary(rows)
    for link, steps, choice, seconds in found:
        table.add_row(link, "never" if steps is None else f"{steps} steps", choice, f"{seconds * 1e3:.0f} ms")
    console.print(table)
    for line in rows[-1]["history"]:
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"replicas bit-identical: {'yes' if is_identical else 'NO'}")
    if asked.plot is not None:
        draw(rows, asked.plot)
    late = any(steps is None or steps > ALLOWED_STEPS for _, steps, _, _ in found)
    return int(late or not is_identical)


if __name__ == "__main__":
    sys.exit(main())
