"""The models that `cgx bench train` trains: random weights and random data, but the real shapes.

Only time is measured, and neither the shapes nor the time depend on what the numbers mean. Torch and transformers load
when a model is built, not for `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, final

from cgx.errors import CgxError, SpecError

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer

    Batch: TypeAlias = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        params: Elements of the gradient.
        batch: Examples in a rank's batch.
        compute_s: What a step costs without communication, on one core of a server of 2023; only for time limits.
        build: Makes the model, without dropout; the caller has seeded torch.
        make_batch: Inputs and targets of so many examples.
        optimizer: The usual one for such a model.
        optimizer_copies: Copies of the parameters that it keeps.
        needs: The package that defines the model, where it is not torch.
    """

    params: int
    batch: int
    compute_s: float
    build: Callable[[], nn.Module]
    make_batch: Callable[[Generator, int], Batch]
    optimizer: Callable[[nn.Module], Optimizer]
    optimizer_copies: int
    needs: str | None = "transformers"


def _tokens(vocabulary: int, length: int = 64) -> Callable[[Generator, int], Batch]:
    """Random text, a target for every token."""

    def make(generator: Generator, count: int) -> Batch:
        import torch

        inputs, targets = torch.randint(vocabulary, (2, count, length), generator=generator)
        return inputs, targets

    return make


def _vectors(*shape: int, classes: int) -> Callable[[Generator, int], Batch]:
    """Normal numbers of a shape, such as an image's, and a class for each."""

    def make(generator: Generator, count: int) -> Batch:
        import torch

        inputs = torch.randn(count, *shape, generator=generator)
        return inputs, torch.randint(classes, (count,), generator=generator)

    return make


def _adamw(model: nn.Module) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(model.parameters(), lr=3e-4)


def _momentum(model: nn.Module) -> Optimizer:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def _gpt(**sizes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))


def _gpt_27m() -> nn.Module:
    sizes = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8000, "n_positions": 256}
    # GPT-2's marks of beginning and end lie outside this vocabulary.
    return _gpt(tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, **sizes)


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))  # type: ignore[call-arg]


def _vit_small() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(  # type: ignore[call-arg]
            hidden_size=384,
            num_hidden_layers=12,
            num_attention_heads=6,
            intermediate_size=1536,
            image_size=96,
            num_labels=1000,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _bert_mini() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _mlp() -> nn.Module:
    from torch import nn

    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 64),
    )


# Images of 64 and 96 pixels leave every layer its shape and a step on one core its half second.
WORKLOADS = {
    "gpt-27m": Workload(27_238_400, 2, 0.4, _gpt_27m, _tokens(8000), _adamw, 2),
    "gpt-124m": Workload(124_439_808, 2, 1.8, _gpt, _tokens(50257), _adamw, 2),
    "resnet50": Workload(25_557_032, 8, 0.5, _resnet50, _vectors(3, 64, 64, classes=1000), _momentum, 1),
    "vit-small": Workload(21_989_224, 4, 0.3, _vit_small, _vectors(3, 96, 96, classes=1000), _adamw, 2),
    "bert-mini": Workload(11_201_594, 4, 0.35, _bert_mini, _tokens(30522), _adamw, 2),
    "mlp": Workload(98_880, 32, 0.002, _mlp, _vectors(64, classes=64), _momentum, 1, needs=None),
}


def find_workloads(names: Iterable[str]) -> dict[str, Workload]:
    """Looks up models by name, in the order asked for.

    Raises:
        SpecError: There is no such model, or none was named.
        CgxError: The package that defines one is missing.
    """
    asked = list(dict.fromkeys(names))
    unknown = [name for name in asked if name not in WORKLOADS]
    if unknown or not asked:
        raise SpecError(f"no model {', '.join(unknown) or 'was named'}: have {', '.join(WORKLOADS)}.")
    found = {name: WORKLOADS[name] for name in asked}
    for name, workload in found.items():
        if workload.needs is not None and find_spec(workload.needs) is None:
            raise CgxError(
                f"{name} is defined by {workload.needs}, which is not installed: `pip install 'cgx[bench]'`, or "
                "train mlp, which needs torch alone."
            )
    return found
