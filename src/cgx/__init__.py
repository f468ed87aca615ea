"""cgx: data-parallel training with compressed gradients.

One line after wrapping a model in DistributedDataParallel:

    handle = cgx.compress(model, "uniform:4")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cgx.core.spec import Cast, Identity, PhaseSpecs, Uniform, parse_spec, parse_specs
from cgx.errors import (
    CgxError,
    CollectiveTimeoutError,
    PeerLostError,
    PlanMismatchError,
    SpecError,
    TransportError,
    WireError,
)

if TYPE_CHECKING:
    from cgx.torch.ddp import compress
    from cgx.torch.functional import all_reduce

__version__ = "0.1.0"
__all__ = [
    "Cast",
    "CgxError",
    "CollectiveTimeoutError",
    "Identity",
    "PeerLostError",
    "PhaseSpecs",
    "PlanMismatchError",
    "SpecError",
    "TransportError",
    "Uniform",
    "WireError",
    "all_reduce",
    "compress",
    "parse_spec",
    "parse_specs",
]

# Loaded at first use, so that `import cgx` stays free of torch.
_LAZY = {"compress": "cgx.torch.ddp", "all_reduce": "cgx.torch.functional"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cgx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
