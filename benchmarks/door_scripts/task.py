"""What every script of `doors.py` trains: a byte-level GPT on the standard library's sources."""

import sys
import sysconfig
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, BATCH, BLOCK = 150, 8, 64
LEARNING_RATE = 2e-3


def make_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=BLOCK, n_embd=160, n_layer=3, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def make_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks to train on, `STEPS` batches for two ranks, and blocks to evaluate on, the same for all seeds."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    blocks = torch.frombuffer(bytearray(text[: len(text) // BLOCK * BLOCK]), dtype=torch.uint8).long().view(-1, BLOCK)
    held_out, rest = blocks[::20], blocks[torch.arange(len(blocks)) % 20 != 0]
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    return rest[order[: 2 * STEPS * BATCH]], held_out[:256]


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, blocks: torch.Tensor) -> float:
    model.eval()
    return model(input_ids=blocks, labels=blocks).loss.item()


def mark(word: str, value: float = 0.0) -> None:
    """Tell whoever counts bytes where training is, and leave the time to count."""
    sys.stdout.write(f"MARK {word} {value!r}\n")
    sys.stdout.flush()
    time.sleep(0.3)
