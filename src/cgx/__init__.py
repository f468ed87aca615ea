"""cgx: data-parallel training with compressed gradients.

One line after wrapping a model in DistributedDataParallel:

    handle = cgx.compress(model, "uniform:4")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgx.compressors.frame import decode, encode
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
    from cgx.torch.ddp import compress
    from cgx.torch.functional import all_reduce
    from cgx.torch.original import CGXState, cgx_hook

__version__ = "0.1.0"
__all__ = [
    "CGXState",
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
    "cgx_hook",
    "compress",
    "decode",
    "encode",
    "parse_spec",
    "parse_specs",
]

# Loaded at first use: `import torch` imports this package wherever it is installed, and must not notice.
_SPEC = dict.fromkeys(("Cast", "Identity", "PhaseSpecs", "Uniform", "parse_spec", "parse_specs"), "cgx.core.spec")
_LAZY = {
    **_SPEC,
    "CGXState": "cgx.torch.original",
    "all_reduce": "cgx.torch.functional",
    "cgx_hook": "cgx.torch.original",
    "compress": "cgx.torch.ddp",
    "decode": "cgx.compressors.frame",
    "encode": "cgx.compressors.frame",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name, "cgx.errors" if name in __all__ else None)
    if module is not None:
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'cgx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
