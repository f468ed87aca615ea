"""Runs that end and begin again: a notebook cell run twice, a group made anew, torchrun after a rank was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.harness import run_processes
from tests.integration.training import all_equal, digest, step
from tests.integration.zoo import mlp


def cell(rank: int, how: str | None) -> str:
    """Run a notebook's cell once: make a model, compress it twice, train."""
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp())
    if how is not None:
        assert cgx.compress(model, how) is cgx.compress(model, how)
    for number in range(3):
        step(model, rank, number)
    return digest(model.parameters())


def notebook(rank: int) -> list[tuple[str, str, str]]:
    """Run the cell twice in a group, then in a group made anew after the first is destroyed."""
    store = dist.distributed_c10d._get_default_store()
    seen = []
    for number in range(3):
        seen.append((cell(rank, None), cell(rank, "off"), cell(rank, "uniform:4")))
        if number:
            dist.destroy_process_group()
            prefixed = dist.PrefixStore(f"cell {number}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2)
    return seen


def test_a_notebook_cell_run_again_gives_the_same_bits() -> None:
    results = run_processes(notebook, 2)
    assert all_equal(results)
    assert all_equal(results[0])
    stock, off, compressed = results[0][0]
    assert off == stock != compressed


_SCRIPT = """
import hashlib, os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from cgx.torch.ddp import handle_of

folder, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
# The launcher's store still has the addresses of the dead, which stock Gloo may take for those of the living.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists(f"{folder}/model.pt"):
    state = torch.load(f"{folder}/model.pt", weights_only=True)
    model.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, 6):
    if attempt == 0 and step == 4 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if step == 2 and rank == 0:
        torch.save({"model": model.state_dict(), "step": 3}, f"{folder}/model.pt")
    dist.barrier()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
digests = [None, None]
dist.all_gather_object(digests, digest)
handle = handle_of(model)
if rank == 0:
    is_compressed = handle is not None and handle.report().ratio > 4
    print("RESULT", attempt, first, digests[0] == digests[1], is_compressed, flush=True)
dist.barrier()
os._exit(0)
"""


def test_torchrun_starts_again_after_a_rank_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)],
        env={**os.environ, "CGX": "uniform:4", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RESULT 1 3 True True" in done.stdout
