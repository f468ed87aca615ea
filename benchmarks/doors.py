"""Does every door compress, at the same loss? Trains one script a framework, stock and through each door.

Two emulated hosts, `uniform:4`, paired seeds. For each door: what changes in the script, bytes on the wire (the
kernel's counters, without the first step) and the final loss on held-out text. Bound and allowance are those of
`paired_seeds.py`. Exits with 1 when a door sends more than a seventh of stock's bytes or its bound is above what is
allowed. Needs network namespaces.

    python benchmarks/doors.py --json benchmarks/results/doors.jsonl
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import t as student

from cgx.core.env import CODEC_THREADS
from cgx.testbed import Hosts, parse_rate

SCRIPTS = Path(__file__).parent / "door_scripts"
LINK, HOW = "1gbit", "uniform:4"
TORCHRUN = ("-m", "torch.distributed.run")
LEAST_RATIO = 7.0


@final
@dataclass(frozen=True)
class Door:
    """How a script comes to compress.

    Args:
        name: What the table calls it.
        script: In `door_scripts`; run as it is, it is stock.
        changes: Lines of it, or what follows the imports, and what they become.
        variable: Of the environment.
        launcher: Instead of torchrun.
    """

    name: str
    script: str
    changes: Mapping[str, str] = field(default_factory=dict)
    variable: str | None = None
    launcher: tuple[str, ...] = TORCHRUN

    @property
    def is_stock(self) -> bool:
        return not self.changes and self.variable is None and self.launcher == TORCHRUN

    def source(self) -> str:
        text = (SCRIPTS / self.script).read_text()
        for old, new in self.changes.items():
            assert text.count(old) == 1, (self.name, old)
            text = text.replace(old, new)
        return text

    def difference(self) -> list[str]:
        before = (SCRIPTS / self.script).read_text().splitlines()
        lines = difflib.unified_diff(before, self.source().splitlines(), n=0, lineterm="")
        return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def doors() -> list[Door]:
    task = "from task import"
    return [
        Door("stock", "plain.py"),
        Door("cgx.compress", "plain.py", {
            task: f"import cgx\n{task}", "optimizer = ": f'cgx.compress(model, "{HOW}")\noptimizer = ',
        }),
        Door(f"CGX={HOW} torchrun", "plain.py", variable=HOW),
        Door(f"cgx run --how {HOW}", "plain.py", launcher=("-m", "cgx.cli", "run", "--how", HOW)),
        Door(f'backend "cgx", CGX={HOW}', "plain.py", {'"gloo"': '"cgx"'}, variable=HOW),
        Door("stock accelerate", "with_accelerate.py"),
        Door("CgxKwargs", "with_accelerate.py", {
            task: f"from cgx.adapters.accelerate import CgxKwargs\n{task}",
            "Accelerator(cpu=True)\n": f'Accelerator(cpu=True)\nCgxKwargs("{HOW}").attach(accelerator)\n',
        }),
        Door("stock Lightning", "with_lightning.py"),
        Door("CgxStrategy", "with_lightning.py", {
            task: f"from cgx.adapters.lightning import CgxStrategy\n{task}", '"ddp"': f'CgxStrategy("{HOW}")',
        }),
        Door("stock Fabric", "with_fabric.py"),
        Door("CgxFabricStrategy", "with_fabric.py", {
            task: f"from cgx.adapters.lightning import CgxFabricStrategy\n{task}",
            '"ddp"': f'CgxFabricStrategy("{HOW}")',
        }),
        Door("stock Trainer", "with_trainer.py"),
        Door("CgxCallback", "with_trainer.py", {
            task: f"from cgx.adapters.huggingface import CgxCallback\n{task}",
            "[Marker()]": f'[Marker(), CgxCallback("{HOW}")]',
        }),
    ]  # fmt: skip


@final
@dataclass(frozen=True)
class Run:
    """One training."""

    door: str
    script: str
    seed: int
    loss: float
    wire_nbytes: int


def train(hosts: Hosts, door: Door, seed: int, folder: Path) -> Run:
    """Runs the script on both hosts; counts what leaves them between its marks."""
    path = folder / "train.py"
    path.write_text(door.source())
    port = hosts.free_port()
    options = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={hosts.addresses[0]}", f"--master-port={port}"]
    argvs = [
        [sys.executable, *door.launcher, *options, f"--node-rank={host}", str(path), str(seed)] for host in range(2)
    ]
    env = {"OMP_NUM_THREADS": "1", CODEC_THREADS: "1", "GLOO_SOCKET_IFNAME": hosts.interface}
    env |= {"PYTHONPATH": str(SCRIPTS), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"CGX": door.variable} if door.variable else {}
    counted: dict[tuple[str, int], int] = {}
    losses: set[float] = set()
    with hosts.start(argvs, env=env) as job:
        for line in job.lines(timeout_seconds=300):
            if not line.text.startswith("MARK "):
                continue
            _, word, value = line.text.split()
            counted[word, line.host] = hosts.counters(line.host).tx_nbytes
            if word == "loss":
                losses.add(float(value))
    assert len(losses) == 1, f"replicas differ under {door.name}: {losses}"
    sent = sum(counted["end", host] - counted["begin", host] for host in range(2))
    return Run(door.name, door.script, seed, losses.pop(), sent)


def work(seeds: int) -> Iterator[Run]:
    jobs = [(seed, door) for seed in range(seeds) for door in doors()]
    with Hosts(2, parse_rate(LINK)) as hosts, TemporaryDirectory() as folder:
        for seed, door in track(jobs, description="training", console=Console(stderr=True)):
            yield train(hosts, door, seed, Path(folder))


def show(runs: list[Run]) -> bool:
    """Prints the table; whether every door passes."""
    columns = ("door", "changes in the script", "stock loss", "mean difference", "upper 95 %", "allowed", "fewer bytes")
    table = Table(*columns, title=f"{HOW} beside stock on 2 hosts, {LINK}, paired seeds", show_lines=True)
    passes = True
    stock_of = {door.script: door.name for door in doors() if door.is_stock}
    for door in doors():
        if door.is_stock:
            continue
        stock = {run.seed: run for run in runs if run.door == stock_of[door.script]}
        mine = {run.seed: run for run in runs if run.door == door.name}
        differences = [mine[seed].loss - stock[seed].loss for seed in stock]
        losses = [run.loss for run in stock.values()]
        upper = statistics.mean(differences) + student.ppf(0.95, len(losses) - 1) * statistics.stdev(
            differences
        ) / math.sqrt(len(losses))
        allowed = max(2 * statistics.stdev(losses), 0.005 * statistics.mean(losses))
        ratio = min(stock[seed].wire_nbytes / mine[seed].wire_nbytes for seed in stock)
        passes &= upper <= allowed and ratio >= LEAST_RATIO
        table.add_row(
            door.name, "\n".join(door.difference()) or "none", f"{statistics.mean(losses):.4f}",
            f"{statistics.mean(differences):+.4f}", f"{upper:+.4f}", f"{allowed:.4f}", f"{ratio:.2f}x",
        )  # fmt: skip
    Console(width=150).print(table)
    return passes


def main() -> int:
    """Runs the benchmark and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write one object a training")
    asked = parser.parse_args()
    runs = []
    for run in work(asked.seeds):
        runs.append(run)
        if asked.json is not None:
            asked.json.write_text("".join(json.dumps(asdict(r)) + "\n" for r in runs))
    return 0 if show(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
