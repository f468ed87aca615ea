"""The codec as a library: one array to bytes that describe themselves, and back (docs/frame-format.md).

A frame is for what has no plan that both sides agreed about: updates of federated clients, checkpoints, files.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.registry import compressor_for
from cgx.core.segments import CARRIERS, single_row
from cgx.core.spec import Cast, Dtype, Identity, PhaseSpecs, Spec, Uniform, parse_spec
from cgx.core.wire import align
from cgx.errors import SpecError, WireError
from cgx.kernels.reference import to_f32

FRAME_VERSION = 1
MAGIC = b"CGXF"
MAX_NDIM = 32  # what every supported NumPy can represent
MAX_NUMEL = 1 << 48  # far above any memory; keeps sizes inside 64 bits whatever the dtype
BF16 = 3  # code of the one dtype NumPy lacks
# NumPy's text for the dtype of each code. Codes are for ever: append only.
DTYPES = {
    1: "<f4", 2: "<f2", BF16: "<u2", 4: "<f8", 5: "<c8", 6: "<c16", 7: "|b1",
    8: "|i1", 9: "<i2", 10: "<i4", 11: "<i8", 12: "|u1", 13: "<u2", 14: "<u4", 15: "<u8",
}  # fmt: skip
_CODES = {text: code for code, text in DTYPES.items() if code != BF16}
_COMPRESSIBLE: dict[int, Dtype] = {1: "fp32", 2: "fp16", BF16: "bf16"}
_HEAD = struct.Struct("<4sBBBBQQ")
_CHECKSUM = struct.Struct("<I")
_STREAM = 0  # a frame has one payload, so its key needs no further separation


def encode(x: Any, spec: Spec | str, *, key: int = 0) -> bytes:
    """One array as a frame, which ``decode`` reads without being told anything else.

    Args:
        x: A NumPy array, or a torch tensor (of any device; it is brought to the CPU), of any shape and memory order;
            empty and 0-d too. ``float32``, ``float16`` and bfloat16 with any spec; ``float64``, complex, boolean and
            integer arrays with ``identity``, which carries every dtype bit for bit.
        spec: One spec or its text, such as ``"uniform:4"``.
        key: 64 bits that choose the random bits of ``stochastic`` and ``dithered`` rounding. The frame holds them.
            Arrays that will be averaged need different keys, or their errors do not average out.

    Returns:
        The frame. The same elements, shape, dtype, spec and key give the same bytes on every machine.

    Raises:
        SpecError: Two specs (``A+B``), a dtype the spec cannot compress, a key out of range, or no array at all.

    Cost:
        One pass over the elements on one thread, and a checksum over the compressed bytes. The frame has 28 bytes, 8
        per dimension and the spec's text beside the payload.

    Example:
        >>> frame = encode(np.ones((3, 5), np.float32), "identity")
        >>> len(frame), decode(frame).shape
        (116, (3, 5))
    """
    chosen = _one_spec(spec)
    if not (isinstance(key, int | np.integer) and 0 <= key < 1 << 64):
        raise SpecError(f"cgx.encode: key must be an integer from 0 to 2**64 - 1, found {key!r}")
    array, code = _array_of(x)
    if array.ndim > MAX_NDIM or _extent(array.shape) > MAX_NUMEL:
        raise SpecError(f"cgx.encode: a frame holds up to {MAX_NDIM} dimensions and 2**48 elements: {array.shape}")
    if not isinstance(chosen, Identity) and code not in _COMPRESSIBLE:
        raise SpecError(
            f"cgx.encode: {chosen} compresses float32, float16 and bfloat16, found {array.dtype}; convert the array "
            "first, or use 'identity', which carries every dtype bit for bit"
        )
    payload_nbytes = _payload_nbytes(chosen, array.size, code)
    head = Frame(chosen, code, array.shape, int(key), payload_nbytes).head()
    frame = np.zeros(len(head) + payload_nbytes + _CHECKSUM.size, np.uint8)
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    _write(chosen, array, code, frame[len(head) : -_CHECKSUM.size], int(key))
    _CHECKSUM.pack_into(frame.data, len(frame) - _CHECKSUM.size, zlib.crc32(frame[: -_CHECKSUM.size].data))
    return frame.tobytes()


def decode(frame: Any) -> NDArray[Any]:
    """The array in a frame; safe on bytes of any origin, which it checks before it allocates.

    Args:
        frame: ``bytes``, or anything with contiguous memory: ``bytearray``, ``memoryview``, ``mmap``, a NumPy array.

    Returns:
        A new array of the frame's shape and dtype in native byte order. bfloat16, which NumPy lacks, arrives as
        ``float32``. For torch: ``torch.from_numpy(cgx.decode(frame)).to(x.dtype)``.

    Raises:
        WireError: Not a frame, truncated, followed by other bytes, damaged, of another version, or inconsistent.

    Cost:
        A checksum and a copy of the compressed bytes, then one pass over the elements on one thread. The result has at
        most 32 times the bytes of the frame (one bit per element).

    Example:
        >>> decode(encode(np.arange(3), "identity")).tolist()
        [0, 1, 2]
    """
    try:
        data = memoryview(frame).cast("B")
    except TypeError as cause:
        raise WireError(
            f"cgx.decode takes bytes or another object with contiguous memory, found {type(frame).__name__}"
        ) from cause
    found, start = Frame.read(data)
    numel = math.prod(found.shape)
    # A copy, because kernels are compiled for aligned memory and a frame may start anywhere.
    payload = np.frombuffer(data, np.uint8)[start : start + found.payload_nbytes].copy()
    return _read(found, payload, numel).reshape(found.shape)


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """What stands in a frame beside its payload.

    Args:
        spec: How the payload is written.
        code: Dtype of the elements, a key of ``DTYPES``.
        shape: Shape of the array; elements lie in C order.
        key: Key of the random bits.
        payload_nbytes: Bytes of the payload, its padding included.
    """

    spec: Spec
    code: int
    shape: tuple[int, ...]
    key: int
    payload_nbytes: int

    def head(self) -> bytes:
        """Everything in front of the payload, a multiple of 8 bytes."""
        text = str(self.spec).encode("ascii")
        fixed = _HEAD.pack(MAGIC, FRAME_VERSION, self.code, len(self.shape), len(text), self.key, self.payload_nbytes)
        return fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape) + text.ljust(align(len(text)), b"\0")

    @classmethod
    def read(cls, data: memoryview) -> tuple[Frame, int]:
        """Checks a whole frame, from its length to what its payload must hold, and finds the payload's first byte.

        Raises:
            WireError: See ``decode``.
        """
        if len(data) < _HEAD.size + _CHECKSUM.size:
            raise WireError(f"cgx.decode: {len(data)} bytes are too few for a frame; was it truncated?")
        magic, version, code, ndim, text_nbytes, key, payload_nbytes = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise WireError(f"cgx.decode: not a frame of cgx.encode: it begins with {magic!r}, not {MAGIC!r}")
        if version != FRAME_VERSION:
            raise WireError(
                f"cgx.decode: the frame has version {version}, this cgx reads version {FRAME_VERSION}; use the "
                "cgx that wrote it, or a newer one"
            )
        text_at = _HEAD.size + 8 * ndim
        start = text_at + align(text_nbytes)
        announced = start + payload_nbytes + _CHECKSUM.size
        if announced != len(data):
            raise WireError(
                f"cgx.decode: the head announces a frame of {announced} bytes, found {len(data)}; "
                f"{'it was truncated' if announced > len(data) else 'other bytes follow it'}, or it is damaged"
            )
        (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
        if (computed := zlib.crc32(data[: -_CHECKSUM.size])) != checksum:
            raise WireError(
                f"cgx.decode: the checksum is {computed:#010x}, the frame says {checksum:#010x}; it is damaged"
            )
        shape = struct.unpack_from(f"<{ndim}Q", data, _HEAD.size)
        found = cls(_spec_of(bytes(data[text_at : text_at + text_nbytes])), code, shape, key, payload_nbytes)
        found.check()
        if found.head() != data[:start]:  # only the padding of the text can differ by now
            raise WireError("cgx.decode: the spec's text is not padded with zeros")
        return found, start

    def check(self) -> None:
        """Holds dtype, shape, spec and payload against each other; nothing is allocated before.

        Raises:
            WireError: They do not fit.
        """
        if self.code not in DTYPES:
            raise WireError(f"cgx.decode: unknown dtype code {self.code}; codes are 1 to {max(DTYPES)}")
        if len(self.shape) > MAX_NDIM or _extent(self.shape) > MAX_NUMEL:
            raise WireError(f"cgx.decode: more than {MAX_NDIM} dimensions or 2**48 elements: shape {self.shape}")
        if not isinstance(self.spec, Identity) and self.code not in _COMPRESSIBLE:
            raise WireError(f"cgx.decode: {self.spec} cannot hold elements of dtype {DTYPES[self.code]}")
        needed = _payload_nbytes(self.spec, math.prod(self.shape), self.code)
        if needed != self.payload_nbytes:
            raise WireError(
                f"cgx.decode: shape {self.shape} needs a payload of {needed} bytes with {self.spec}, "
                f"the frame has {self.payload_nbytes}"
            )


def _one_spec(spec: object) -> Spec:
    if isinstance(spec, PhaseSpecs) or (isinstance(spec, str) and "+" in spec):
        raise SpecError(
            f"cgx.encode: {str(spec)!r} is for the two phases of a reduction; an array is encoded once: give one spec"
        )
    if isinstance(spec, str):
        return parse_spec(spec)
    if isinstance(spec, Identity | Cast | Uniform):
        return spec
    raise SpecError(f"cgx.encode: spec must be a Spec or its text, found {type(spec).__name__}")


def _spec_of(text: bytes) -> Spec:
    """The spec in a frame: one text for each spec, so equal arrays have equal frames."""
    try:
        spec = parse_spec(text.decode("ascii"))
    except ValueError as cause:  # SpecError and UnicodeDecodeError are ValueErrors
        raise WireError(f"cgx.decode: the frame's spec {text!r} is none that this cgx knows") from cause
    if str(spec).encode("ascii") != text:
        raise WireError(f"cgx.decode: the frame's spec {text!r} is not in full; expected {str(spec)!r}")
    return spec


def _array_of(x: Any) -> tuple[NDArray[Any], int]:
    """``x`` as a NumPy array without a copy where possible, and its dtype's code."""
    if isinstance(x, np.ma.MaskedArray):
        raise SpecError("cgx.encode: a frame has no room for the mask of a masked array; fill it first")
    if hasattr(x, "numpy") and hasattr(x, "detach"):  # a torch tensor; torch itself is not imported here
        return _array_of_tensor(x)
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise SpecError(f"cgx.encode: takes a NumPy array or a torch tensor, found {type(x).__name__}")
    array = np.asarray(x)
    if array.dtype.name == "bfloat16":  # of the package ml_dtypes, which JAX uses
        return array.view(np.uint16), BF16
    code = _CODES.get(array.dtype.newbyteorder("<").str)
    if code is None:
        raise SpecError(f"cgx.encode: a frame cannot hold dtype {array.dtype}; convert the array first")
    return array, code


def _array_of_tensor(x: Any) -> tuple[NDArray[Any], int]:
    try:
        if str(x.dtype) == "torch.bfloat16":
            return x.detach().view(sys.modules["torch"].int16).numpy(force=True).view(np.uint16), BF16
        array: NDArray[Any] = x.numpy(force=True)
    except (TypeError, RuntimeError) as cause:  # sparse, quantized, float8, ...
        raise SpecError(
            f"cgx.encode: cannot use a tensor of layout {x.layout} and dtype {x.dtype} ({cause}); make it dense, "
            "and of a dtype that NumPy or bfloat16 has"
        ) from cause
    return _array_of(array)


def _extent(shape: tuple[int, ...]) -> int:
    """Elements the shape would have if its empty dimensions had one: NumPy limits this product, not numel alone."""
    return math.prod(size or 1 for size in shape)


def _payload_nbytes(spec: Spec, numel: int, code: int) -> int:
    if isinstance(spec, Identity):
        return align(numel * np.dtype(DTYPES[code]).itemsize)
    return compressor_for(spec).row_nbytes(numel, _COMPRESSIBLE[code])


def _write(spec: Spec, array: NDArray[Any], code: int, payload: NDArray[np.uint8], key: int) -> None:
    little = np.ascontiguousarray(array, DTYPES[code]).reshape(-1)
    if isinstance(spec, Identity):
        payload[: little.nbytes] = little.view(np.uint8)
        return
    dtype = _COMPRESSIBLE[code]
    # A kernel is compiled anew for unaligned or read-only memory (a mapped file, say): copying that is cheaper.
    flat = np.require(little, CARRIERS[dtype], ["C", "A", "W"])
    table = single_row(flat.size, wire_nbytes=len(payload), dtype=dtype)
    compressor_for(spec).compress(flat, payload, table, np.array([key], np.uint64), _STREAM)


def _read(frame: Frame, payload: NDArray[np.uint8], numel: int) -> NDArray[Any]:
    """The elements, flat."""
    if not isinstance(frame.spec, Identity):
        dtype = _COMPRESSIBLE[frame.code]
        out = np.empty(numel, CARRIERS["fp32" if dtype == "bf16" else dtype])
        table = single_row(numel, wire_nbytes=len(payload), dtype=dtype)
        compressor_for(frame.spec).decompress(payload, out, table, np.array([frame.key], np.uint64), _STREAM)
        return out
    little = np.dtype(DTYPES[frame.code])
    flat = payload[: numel * little.itemsize]
    if little.kind == "b" and (flat > 1).any():
        raise WireError("cgx.decode: a boolean element is neither 0 nor 1")
    values = flat.view(little)
    return to_f32(values) if frame.code == BF16 else values.astype(little.newbyteorder("="), copy=False)
