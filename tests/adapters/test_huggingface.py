"""The Hugging Face Trainer trains a real model on two processes, stock and compressed, and goes on from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.integration.zoo import generator


def lines(count: int) -> list[dict[str, torch.Tensor]]:
    """Text in which each token says which comes next."""
    starts = torch.randint(0, 64, (count, 1), generator=generator(5, 5))
    text = (starts + 7 * torch.arange(16)) % 64
    return [{"input_ids": line, "labels": line} for line in text]


def train(rank: int, job: Job) -> Trained:
    prepare(rank)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from cgx.adapters.huggingface import CgxCallback

    class Killer(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            die_at(job, state.global_step)

    torch.manual_seed(3 + job.first)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=job.accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=SAVED_AT,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        seed=3,
    )
    callback = None if job.how is None else CgxCallback(job.how, job.options)
    callbacks = [Killer()] if callback is None else [callback, Killer()]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=lines(16 * STEPS * job.accumulate), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{SAVED_AT}") if job.first else None)
    logged = [line for line in trainer.state.log_history if "loss" in line and line["step"] > job.first]
    assert all(("cgx/ratio" in line) == (callback is not None) for line in logged)
    return trained([line["loss"] for line in logged], model, callback and callback.handle)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_as_stock_does(tmp_path: Path, accumulate: int) -> None:
    check_beside_stock(train, tmp_path, accumulate=accumulate)


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resume(train, tmp_path)
    files = sorted(path.name for path in (tmp_path / "cut" / f"checkpoint-{SAVED_AT}").glob("cgx-*"))
    assert files == ["cgx-0.pt", "cgx-1.pt"]
