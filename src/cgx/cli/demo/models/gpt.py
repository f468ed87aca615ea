"""A byte-level GPT of 3.2 million parameters, nearly all of them in matrices worth compressing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 256
LAYERS = 4
HEADS = 4
CONTEXT = 64
VOCABULARY = 256


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a perceptron of four times the width.

    No layer has a bias: vectors are never compressed, so biases would only dilute the ratio.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps activations of shape (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        q, k, v = qkv.view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        out: Tensor = x + self.mlp_out(hidden)
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte of a text.

    The input embedding is also the output matrix: tied weights, one parameter to a reducer.

    Args:
        width: Channels of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; divides `width`.
        context: Longest input, in bytes.
    """

    def __init__(
        self,
        *,
        width: int = WIDTH,
        layers: int = LAYERS,
        heads: int = HEADS,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds two branches to the residual stream: keep its variance.
                deep = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps int64 tokens of shape (batch, time) to fp32 logits of shape (batch, time, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.final_norm(x), self.token_embedding.weight)
