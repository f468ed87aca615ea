"""accelerate trains a real model on two processes, stock and compressed, and goes on from its checkpoints."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.adapters.launch import (
    SAVED_AT,
    STEPS,
    Job,
    Trained,
    check_beside_stock,
    check_resume,
    die_at,
    prepare,
    trained,
)
from tests.harness import run_processes
from tests.integration.training import batch
from tests.integration.zoo import mlp


def train(rank: int, job: Job) -> Trained:
    prepare(rank)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    handler = None
    if job.how is not None:
        from cgx.adapters.accelerate import CgxKwargs

        handler = CgxKwargs(job.how, job.options, bucket_cap_mb=1).attach(accelerator)
    torch.manual_seed(3 + job.first)  # what goes on must not owe its weights to the seed
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert dist.get_world_size() == accelerator.num_processes == 2
    if job.first:
        accelerator.load_state(str(job.folder / "state"))
    losses = []
    for step in range(job.first, STEPS):
        die_at(job, step)
        for part in range(job.accumulate):
            x, y = batch(rank, step * job.accumulate + part)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED_AT and not job.first:
            accelerator.save_state(str(job.folder / "state"))
            accelerator.wait_for_everyone()
    return trained(losses, accelerator.unwrap_model(model), handler and handler.handles[0])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_as_stock_does(tmp_path: Path, accumulate: int) -> None:
    check_beside_stock(train, tmp_path, accumulate=accumulate)


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resume(train, tmp_path)
    assert sorted(path.name for path in (tmp_path / "cut" / "state").glob("cgx-*")) == ["cgx-0-0.pt", "cgx-0-1.pt"]


def two_models(rank: int) -> dict[str, float]:
    prepare(rank)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from cgx.adapters.accelerate import CgxKwargs

    accelerator = Accelerator(cpu=True)
    handler = CgxKwargs("uniform:4", find_unused_parameters=True).attach(accelerator)
    assert handler.to_kwargs() == DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs()
    first, second = accelerator.prepare(mlp(), mlp())
    assert first.find_unused_parameters
    (first(torch.ones(2, 64)).sum() + second(torch.ones(2, 64)).sum()).backward()
    return handler.scalars()


def test_two_models_have_numbers_of_their_own() -> None:
    scalars, _ = run_processes(two_models, 2, timeout_seconds=110.0)
    assert scalars["cgx/ratio"] > 6
    assert scalars["cgx/1/ratio"] == scalars["cgx/ratio"]


def tracked(rank: int, folder: Path) -> None:
    prepare(rank)
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    from cgx.adapters.accelerate import CgxKwargs

    class Lines(GeneralTracker):
        name, requires_logging_directory = "lines", False

        @property
        def tracker(self) -> None:
            return None

        @on_main_process
        def log(self, values: dict[str, float], step: int | None, **_: object) -> None:
            (folder / "lines.json").write_text(json.dumps({"step": step, **values}))

    accelerator = Accelerator(cpu=True, log_with=[Lines()])
    handler = CgxKwargs("uniform:4").attach(accelerator)
    accelerator.init_trackers("run")
    model = accelerator.prepare(mlp())
    accelerator.backward(model(torch.ones(2, 64)).sum())
    accelerator.log({"loss": 1.0, **handler.scalars()}, step=5)


def test_numbers_reach_a_tracker(tmp_path: Path) -> None:
    run_processes(tracked, 2, tmp_path, timeout_seconds=110.0)
    line = json.loads((tmp_path / "lines.json").read_text())
    assert line["step"] == 5
    assert line["cgx/ratio"] > 6


def misused(rank: int) -> None:
    prepare(rank)
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    import cgx
    from cgx.adapters.accelerate import CgxKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    with pytest.raises(cgx.SpecError, match="pass their arguments to CgxKwargs"):
        CgxKwargs("uniform:4").attach(accelerator)
    with pytest.raises(cgx.SpecError, match="comm_hook=fp16"):
        CgxKwargs("uniform:4", comm_hook=DDPCommunicationHookType.FP16)


def test_what_would_be_lost_is_refused() -> None:
    run_processes(misused, 2, timeout_seconds=110.0)


def prepared_again(rank: int, folder: Path) -> int:
    """A model is prepared, dropped (out of memory, say) and prepared again."""
    prepare(rank)
    from accelerate import Accelerator

    from cgx.adapters.accelerate import CgxKwargs

    accelerator = Accelerator(cpu=True)
    handler = CgxKwargs("uniform:4").attach(accelerator)
    for _ in range(3):
        model = accelerator.prepare(mlp())
        model(torch.ones(2, 64)).sum().backward()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("cgx-session")]
        assert len(threads) == 1, threads
        (model,) = accelerator.free_memory(model)
        gc.collect()
    model = accelerator.prepare(mlp())
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    return len(handler.handles)


def test_a_model_that_was_dropped_leaves_nothing(tmp_path: Path) -> None:
    assert run_processes(prepared_again, 2, tmp_path, timeout_seconds=110.0) == [1, 1]
    assert sorted(path.name for path in tmp_path.glob("cgx-*")) == ["cgx-0-0.pt", "cgx-0-1.pt"]
