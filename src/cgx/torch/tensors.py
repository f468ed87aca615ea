"""Which tensors can be reduced."""

from __future__ import annotations

import torch

from cgx.errors import SpecError


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuses what no path can reduce.

    Raises:
        SpecError: Wrong kind of object, device or dtype.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(f"{name}: cgx reduces torch tensors, found {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise SpecError(
            f"{name}: the tensor is on {tensor.device}; this version of cgx has kernels for CPU tensors only. Move the "
            "model to the CPU, or use stock DDP on this device"
        )
    if tensor.layout is not torch.strided or any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise SpecError(
            f"{name}: cgx reduces dense tensors whose elements have memory of their own, found layout {tensor.layout}, "
            f"shape {list(tensor.shape)}; make it dense and contiguous first"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SpecError(f"{name}: cgx reduces floating and complex tensors, found {tensor.dtype}; use dist.all_reduce")
