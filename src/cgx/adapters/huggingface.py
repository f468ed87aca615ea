"""Hugging Face Trainer: a callback that compresses the model which the Trainer wraps in DDP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cgx.adapters.files import load_from_beside, save_beside
from cgx.core.plan import How
from cgx.torch.automatic import watch, wrapper_of
from cgx.torch.ddp import compress
from cgx.torch.handle import Handle

_LOG = logging.getLogger("cgx")


class CgxCallback(TrainerCallback):
    """``Trainer(..., callbacks=[CgxCallback("auto")])``: compressed gradients in the Trainer's DDP training.

    Make it before ``trainer.train()``. Every rank writes ``cgx-<rank>.pt`` into the Trainer's checkpoints; training
    that goes on from one reads them. What is logged holds ``Report.scalars``, for callbacks that come after this one.

    Args:
        how: As for ``cgx.compress``.
        options: Further ones of ``cgx.compress``, such as ``{"error_feedback": True}``.
        resume_from: The checkpoint that training goes on from; None takes it from the Trainer's arguments, or looks
            for ``checkpoint-<step>`` in the ``output_dir``, where the Trainer put it.

    Attributes:
        handle: Of the model that was trained last; None before, with one process, or without DDP.
    """

    def __init__(
        self, how: How = "auto", options: Mapping[str, Any] | None = None, resume_from: str | Path | None = None
    ) -> None:
        self.how, self.options = how, dict(options or {})
        self.handle: Handle | None = None
        self._resume_from = resume_from
        watch()  # a callback is told of the model, not of the DDP around it

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Compresses the model; goes on from the checkpoint's states."""
        wrapper = None if model is None else wrapper_of(model)
        if wrapper is None:
            if args.world_size > 1 and state.is_world_process_zero:
                _LOG.warning("the Trainer's model is not wrapped in DistributedDataParallel; cgx leaves it alone")
            return
        self.handle = compress(wrapper, self.how, **self.options)
        if state.global_step:
            given = self._resume_from or args.resume_from_checkpoint
            folder = Path(given) if given and Path(given).is_dir() else _folder(args, state)
            hint = ". If it lies elsewhere, say where: CgxCallback(..., resume_from=folder)"
            load_from_beside(self.handle, partial(_path, folder), step=state.global_step, hint=hint)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Writes this rank's state into the checkpoint that was just made; a search's trials go on from none."""
        if self.handle is not None and not state.is_hyper_param_search:
            save_beside(self.handle, partial(_path, _folder(args, state)), step=state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the connections; the handle's report stays."""
        if self.handle is not None:
            self.handle.remove()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Adds the scalars to what is logged of training, and to the Trainer's own record."""
        if self.handle is None or logs is None or "loss" not in logs:
            return
        scalars = self.handle.report().scalars()
        logs |= scalars
        state.log_history[-1] |= scalars


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"cgx-{rank}.pt"
