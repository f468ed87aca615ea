"""What `import torch` loads of cgx, whether it is used or not: it must be tiny, and must not fail."""

from __future__ import annotations

from typing import Any

from cgx.core.env import how


def load() -> None:
    """Makes the backend name ``cgx`` known, and watches for DDP models where the environment asks for it.

    The entry point of group ``torch.backends``. Cost: well under a millisecond while it does not.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    if "cgx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("cgx", _make_group, devices=["cpu", "cuda"])

    if how() is not None:
        from cgx.torch.automatic import watch

        watch()


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from cgx.torch.backend import make_group

    return make_group(store, rank, size, timeout)
