"""Hugging Face Trainer, with compressed gradients: one callback more.

torchrun --standalone --nproc-per-node 2 examples/train_huggingface.py
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from cgx.adapters.huggingface import CgxCallback

BLOCK = 64
text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()  # any text
blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)
dataset = [{"input_ids": block, "labels": block} for block in blocks]

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=128, n_layer=2, n_head=4))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=mkdtemp(),
        use_cpu=True,
        max_steps=30,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=dataset,
    callbacks=[CgxCallback("uniform:4")],
)
trainer.train()
