"""Where does the processor time of an all-reduce go? CPU seconds per GB of gradient, by codec, transport and kernel.

Each rank reduces 100 MB a few times; Linux tells what its threads used, in user mode and in the kernel. `codec` is what
the codec calls used; `engine` the threads of Gloo in user mode; `python` all other user time; `kernel` all system time,
TCP above all.

    python benchmarks/cpu_account.py --hosts 2,4 --link none,1gbit
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cgx.testbed import Hosts, parse_rate

NUMEL, TURNS = 25_000_000, 8
WAYS = ("gloo fp32", "scatter_reduce", "all_gather")


def work() -> None:
    """One rank: measures every way and prints a line."""
    import resource

    import torch
    import torch.distributed as dist

    from cgx.collectives.base import Op
    from cgx.compressors.uniform import UniformCompressor
    from cgx.core.plan import Parameter, to_specs
    from cgx.torch.method import GIVEN, Method
    from cgx.torch.session import Session

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    assert dist.group.WORLD is not None
    spent = {"codec": 0.0}

    def timed(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent["codec"] += time.thread_time() - start

        return call

    for name in ("compress", "decompress", "reduce"):
        setattr(UniformCompressor, name, timed(getattr(UniformCompressor, name)))
    session = Session(dist.group.WORLD, [Parameter("x", (NUMEL,), "fp32")], {GIVEN: {"x": to_specs("uniform:4")}})
    x = torch.randn(NUMEL)

    def reduce(way: str) -> None:
        if way == "gloo fp32":
            dist.all_reduce(x)
        else:
            session.reduce({"x": x}, Op.AVG, label=way, method=Method(GIVEN, way))  # type: ignore[arg-type]

    found = {}
    for way in WAYS:
        reduce(way)
        dist.barrier()
        spent["codec"], start = 0.0, time.perf_counter()
        before, threads = resource.getrusage(resource.RUSAGE_SELF), _user_seconds()
        for _ in range(TURNS):
            reduce(way)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        engine = sum(s - threads.get(t, 0.0) for t, s in _user_seconds().items() if "gloo" in t)
        gigabytes = 4e-9 * NUMEL * TURNS
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        parts = {"codec": spent["codec"], "engine": engine, "python": max(0.0, user - spent["codec"] - engine)}
        parts["kernel"] = system
        found[way] = {"seconds": seconds / TURNS} | {name: value / gigabytes for name, value in parts.items()}
        dist.barrier()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    session.close()
    dist.destroy_process_group()


def _user_seconds() -> dict[str, float]:
    """User time by thread, named."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for thread in os.listdir("/proc/self/task"):
        text = Path(f"/proc/self/task/{thread}/stat").read_text()
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        found[f"{name}-{thread}"] = int(rest[11]) / ticks
    return found


def main() -> None:
    """Measures all asked settings and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--link", default="none,1gbit")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work()
        return
    table = Table("hosts", "link", "way", "ms", "codec", "python", "engine", "kernel", "sum",
                  title="CPU seconds of a rank per GB of gradient, 100 MB, uniform:4")  # fmt: skip
    for count in map(int, asked.hosts.split(",")):
        for link in asked.link.split(","):
            with Hosts(count, parse_rate(link)) as hosts, hosts.torchrun([__file__, "--work"]) as job:
                found = json.loads(next(line.text for line in job.lines(600) if line.text.startswith("{")))
                job.wait(60)
            for way, row in found.items():
                parts = [row[name] for name in ("codec", "python", "engine", "kernel")]
                cells = [f"{value:.2f}" for value in (*parts, sum(parts))]
                table.add_row(str(count), link, way, f"{row['seconds'] * 1e3:.0f}", *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
