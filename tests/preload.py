"""What every rank's process needs and is slow to get: imported once, in the server they are forked from."""

import numpy as np
import pytest
import torch
import torch._dynamo  # the constructor of DistributedDataParallel imports it

import cgx.torch.ddp
import cgx.torch.functional
from cgx.compressors.base import OWN
from cgx.compressors.registry import compressor_for
from cgx.core.segments import CARRIERS, single_row
from cgx.core.spec import Cast, Identity, Uniform

__all__ = ["cgx", "pytest", "torch"]


def warm_kernels() -> None:
    """Load the kernels of all gradient dtypes from Numba's cache, or compile them."""
    for spec in (Uniform(), Identity(), Cast()):
        codec = compressor_for(spec)
        for dtype, carrier in CARRIERS.items():
            table = single_row(64, wire_nbytes=codec.row_nbytes(64, dtype), dtype=dtype)
            x, wire, keys = np.zeros(64, carrier), np.zeros(table.wire_nbytes, np.uint8), np.zeros(1, np.uint64)
            codec.compress(x, wire, table, keys, 0)
            codec.decompress(wire, x, table, keys, 0)
            starts = np.zeros(1, np.int64)
            codec.reduce(
                wire, starts, x, wire.copy(), table, table, keys, into=codec, senders=[OWN], stream_out=0, scale=1.0
            )


warm_kernels()
