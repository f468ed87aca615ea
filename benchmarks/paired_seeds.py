"""Is the loss the same? Reads the JSON lines of `cgx demo --seeds 5 --json` and bounds the paired difference.

For each model and each compressed `how`: the mean over seeds of (compressed - stock) final loss, its one-sided upper
95 % bound (Student's t on the paired differences), and what is allowed: the larger of two standard deviations of stock
over its seeds and 0.5 % of stock. Exits with 1 when a bound is above what is allowed.

    cgx demo --link 1gbit --seeds 5 --json > runs.jsonl
    python benchmarks/paired_seeds.py runs.jsonl
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

STOCK = "off"


def main(path: Path) -> int:
    """Prints the table and returns the exit code."""
    runs = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    losses = {(run["model"], run["how"], run["seed"]): run["final_loss"] for run in runs}
    speedups: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        speedups.setdefault((run["model"], run["how"]), []).append(run["speedup"])
    columns = ["model", "how", "seeds", "stock loss", "mean difference", "upper 95 %", "allowed", "within", "speed-up"]
    table = Table(*columns)
    is_within = True
    for model, how in sorted({(model, how) for model, how, _ in losses if how != STOCK}):
        seeds = sorted(seed for m, h, seed in losses if (m, h) == (model, how) and (model, STOCK, seed) in losses)
        stock = [losses[model, STOCK, seed] for seed in seeds]
        differences = [losses[model, how, seed] - losses[model, STOCK, seed] for seed in seeds]
        mean, spread = statistics.mean(differences), statistics.stdev(differences)
        upper = mean + student.ppf(0.95, len(seeds) - 1) * spread / math.sqrt(len(seeds))
        allowed = max(2 * statistics.stdev(stock), 0.005 * statistics.mean(stock))
        is_within &= upper <= allowed
        table.add_row(
            model, how, str(len(seeds)), f"{statistics.mean(stock):.4f}", f"{mean:+.4f}", f"{upper:+.4f}",
            f"{allowed:.4f}", "yes" if upper <= allowed else "NO", f"{statistics.median(speedups[model, how]):.2f}x",
        )  # fmt: skip
    Console(width=120).print(table)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
