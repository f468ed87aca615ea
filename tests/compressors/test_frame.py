"""Frames: what goes in comes out, the same bytes everywhere, and only clean errors on bytes of any origin."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from cgx.compressors.base import Compressor
from cgx.compressors.frame import DTYPES, FRAME_VERSION, MAX_NDIM, decode, encode
from cgx.compressors.registry import compressor_for
from cgx.core.segments import single_row
from cgx.core.spec import PhaseSpecs, Spec, Uniform, parse_spec
from cgx.errors import SpecError, WireError
from tests.compressors.mutations import forge, mutants, originals, seal
from tests.strategies import ALL_UNIFORM, Floats, gradient, gradients, in_dtype, uniform_specs

KEY = 0x0123456789ABCDEF
EXACT_DTYPES = [text for text in DTYPES.values() if text not in ("<f4", "<f2")]
SHAPES = ((), (0,), (0, 3), (1,), (5, 8), (129,), (3, 1, 43))


def bits(x: NDArray[Any]) -> bytes:
    """Compare arrays by these: NaN equals itself, and zeros differ by sign."""
    return np.ascontiguousarray(x).tobytes()


def by_compressor(x: Floats, spec: Spec, key: int) -> Floats:
    """Compress and decompress one row without a frame."""
    codec: Compressor = compressor_for(spec)
    nbytes = codec.row_nbytes(x.size, "fp32")
    wire, out, keys = np.zeros(nbytes, np.uint8), np.empty(x.size, np.float32), np.array([key], np.uint64)
    table = single_row(x.size, wire_nbytes=nbytes)
    codec.compress(x.reshape(-1).copy(), wire, table, keys, 0)
    codec.decompress(wire, out, table, keys, 0)
    return out.reshape(x.shape)


@given(x=gradients(), spec=uniform_specs | st.sampled_from([parse_spec("bf16")]), key=st.integers(0, 2**64 - 1))
def test_a_frame_says_what_the_compressor_says(x: Floats, spec: Spec, key: int) -> None:
    assert bits(decode(encode(x, spec, key=key))) == bits(by_compressor(x, spec, key))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", ["identity", "bf16", "uniform:4", "uniform:8/rounding=nearest"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_shape_and_dtype_survive(shape: tuple[int, ...], spec: str, dtype: type) -> None:
    x = gradient("normal", int(np.prod(shape))).reshape(shape).astype(dtype)
    y = decode(encode(x, spec))
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.flags.writeable
    assert y.flags.c_contiguous
    np.testing.assert_allclose(y, x, atol=0.4, rtol=2**-8)


@pytest.mark.parametrize("dtype", EXACT_DTYPES)
def test_identity_carries_every_dtype_bit_for_bit(dtype: str) -> None:
    raw = np.arange(96, dtype=np.uint8) % 2 if dtype == "|b1" else np.arange(96, dtype=np.uint8) * 37
    x = raw.astype(np.uint8).view(dtype).reshape(2, -1)
    y = decode(encode(x, "identity"))
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert bits(y) == bits(x)
    with pytest.raises(SpecError, match=r"compresses float32, float16 and bfloat16, found .* use 'identity'"):
        encode(x, "uniform:4")


def test_non_finite_values_follow_the_laws_of_the_compressors() -> None:
    x = np.arange(96, dtype=np.float32)
    x[40], x[41] = np.nan, np.inf
    assert bits(decode(encode(x, "identity"))) == bits(x)
    np.testing.assert_array_equal(decode(encode(x, "bf16")), x)
    poisoned = np.isnan(decode(encode(x, "uniform:4/block=32")))
    assert poisoned.tolist() == [32 <= i < 64 for i in range(96)]


@pytest.mark.parametrize("spec", ["identity", "bf16", "uniform:4"])
def test_layout_in_memory_does_not_matter(spec: str) -> None:
    x = gradient("normal", 48 * 20).reshape(48, 20)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    wide = np.zeros((96, 60), np.float32)
    wide[::2, ::3] = x
    expected = encode(x, spec, key=KEY)
    for other in (np.asfortranarray(x), frozen, unaligned, wide[::2, ::3], x[::-1][::-1], x.astype(">f4")):
        assert encode(other, spec, key=KEY) == expected


@pytest.mark.parametrize("spec", ["identity", "bf16", "uniform:4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensor_gives_the_bytes_of_the_array(spec: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(gradient("normal", 300).reshape(20, 15)).to(dtype)
    expected = encode(x.numpy(), spec, key=KEY)
    assert encode(x, spec, key=KEY) == expected
    assert encode(torch.nn.Parameter(x), spec, key=KEY) == expected
    assert encode(x.t().contiguous().t(), spec, key=KEY) == expected


@pytest.mark.parametrize("spec", ["identity", "bf16", "uniform:4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (300,), (20, 15)])
def test_bfloat16_arrives_as_float32(spec: str, shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(gradient("normal", int(np.prod(shape))).reshape(shape)).to(torch.bfloat16)
    y = decode(encode(x, spec, key=KEY))
    assert (y.dtype, y.shape) == (np.float32, shape)
    if spec == "uniform:4":
        assert bits(y) == bits(by_compressor(x.float().numpy(), Uniform(4), KEY))
    else:
        assert torch.equal(torch.from_numpy(y).to(x.dtype), x)


def test_the_key_travels_and_chooses_the_random_bits() -> None:
    x = gradient("normal", 4096)
    for spec in ("uniform:4", "uniform:4/rounding=stochastic"):
        first, second = (encode(x, spec, key=key) for key in (1, 2))
        assert first == encode(x, spec, key=np.uint64(1))
        assert encode(x, spec) == encode(x, spec, key=0)
        assert bits(decode(first)) != bits(decode(second))
    many = np.mean([decode(encode(x, "uniform:2", key=key)) for key in range(64)], axis=0)
    one = decode(encode(x, "uniform:2"))
    assert np.square(many - x).mean() < np.square(one - x).mean() / 32


def test_decode_takes_any_contiguous_memory() -> None:
    x = gradient("normal", 100)
    frame = encode(x, "uniform:4")
    expected = bits(decode(frame))
    inside = memoryview(b"abc" + frame + b"d")[3:-1]
    for given_as in (bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8), inside):
        assert bits(decode(given_as)) == expected
    for nothing in ("text", None, 3, memoryview(frame)[::2]):
        with pytest.raises(WireError, match="contiguous memory"):
            decode(nothing)


def test_decoded_array_does_not_share_the_frame() -> None:
    frame = bytearray(encode(np.arange(4), "identity"))
    y = decode(frame)
    frame[:] = bytes(len(frame))
    assert y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("x", "spec", "message"),
    [
        (np.ones(4), "uniform:4", "found float64"),
        (np.ones(4, np.float32), "uniform:4+bf16", "two phases of a reduction"),
        (np.ones(4, np.float32), PhaseSpecs(Uniform(4), Uniform(4)), "two phases of a reduction"),
        (np.ones(4, np.float32), "zip", "unknown spec"),
        (np.ones(4, np.float32), 4, "found int"),
        ([1.0, 2.0], "identity", "found list"),
        (np.array(["a"]), "identity", "cannot hold dtype"),
        (np.array([None]), "identity", "cannot hold dtype"),
        (np.zeros(2, [("a", "f4")]), "identity", "cannot hold dtype"),
        (np.zeros(2, "M8[s]"), "identity", "cannot hold dtype"),
        (np.ma.masked_array(np.ones(2), [0, 1]), "identity", "mask"),
        (np.zeros((0, 2**49)), "identity", "elements"),
        (torch.ones(3).to_sparse(), "identity", "make it dense"),
        (torch.ones(3).to(torch.float8_e4m3fn), "identity", "dtype torch.float8_e4m3fn"),
    ],
)
def test_encode_refuses(x: Any, spec: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        encode(x, spec)


@pytest.mark.parametrize("key", [-1, 2**64, 1.0, "1", None])
def test_encode_refuses_a_key_that_does_not_fit(key: Any) -> None:
    with pytest.raises(SpecError, match="key must be an integer"):
        encode(np.ones(4, np.float32), "uniform:4", key=key)


UNIFORM_1 = b"uniform:1/block=65536/rounding=dithered/scale=bf16"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "too few"),
        (bytes(28), "not a frame"),
        (seal(b"CGXF" + bytes([FRAME_VERSION + 1]) + bytes(19)), "version 2"),
        (forge(payload_nbytes=2**64 - 1), "truncated"),
        (forge()[:-1], "truncated"),
        (forge() + b"!", "other bytes follow"),
        (forge(payload_nbytes=0), "other bytes follow"),
        (forge()[:-1] + b"!", "checksum"),
        (forge(code=0), "dtype code 0"),
        (forge(code=16), "dtype code 16"),
        (forge(shape=(1,) * (MAX_NDIM + 1)), "dimensions"),
        (forge(shape=(2**32, 2**32)), "elements"),  # 2**64 wraps to no elements at all
        (forge(shape=(2**63, 2)), "elements"),
        (forge(shape=(0, 2**63), payload=b""), "elements"),
        (forge(shape=(2**48,)), "needs a payload of 1125899906842624 bytes"),
        (forge(shape=(2**40,), text=UNIFORM_1), "needs a payload"),
        (forge(shape=(3,)), "needs a payload of 16 bytes"),
        (forge(code=4, text=b"cast:bf16"), "cannot hold elements of dtype <f8"),
        (forge(text=b"uniform:4/block=4294967296/rounding=dithered/scale=bf16"), "none that this cgx knows"),
        (forge(text=b"uniform:4/block=" + b"9" * 200), "none that this cgx knows"),
        (forge(text=b"\xff\xfe"), "none that this cgx knows"),
        (forge(text=b""), "none that this cgx knows"),
        (forge(text=b"uniform:4"), "not in full"),
        (forge(text=b" identity"), "not in full"),
        (forge(text=b"cast:bf16", padding=b"?"), "not padded"),
        (forge(code=7, payload=bytes([2] + 7 * [0])), "neither 0 nor 1"),
    ],
)
def test_decode_refuses(frame: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(frame)


def test_a_frame_written_by_hand_is_read() -> None:
    values = np.array([1.5, -2.0], np.float32)
    assert decode(forge(shape=(2, 1), payload=values.tobytes())).tolist() == [[1.5], [-2.0]]


@pytest.mark.parametrize("position", range(0, 256, 7))
def test_every_damaged_bit_is_found(position: int) -> None:
    for frame in originals():
        damaged = bytearray(frame)
        damaged[position % len(frame)] ^= 1 << position % 8
        with pytest.raises(WireError):
            decode(damaged)


# What the error of each check says, and of no other.
CHECKS = (
    "too few", "not a frame", "has version", "it was truncated", "other bytes follow", "checksum", "none that this cgx",
    "not in full", "dtype code", "dimensions or", "cannot hold", "needs a payload", "not padded", "neither 0 nor 1",
)  # fmt: skip


def outcome(frame: bytes) -> str:
    """Decode a frame that may have faults; anything but an array or the WireError of a check fails the test."""
    try:
        y = decode(frame)
    except WireError as error:
        (check,) = (check for check in CHECKS if check in str(error))
        return check
    assert y.nbytes <= 32 * len(frame)
    return "an array"


def test_100_000_mutated_frames_raise_nothing_but_wire_errors() -> None:
    outcomes = Counter(map(outcome, mutants(100_000, seed=1)))
    assert outcomes.total() == 100_000
    assert outcomes.keys() == {"an array", *CHECKS}  # no check hides the ones behind it
    assert outcomes["an array"] > 5000


def test_mutated_frames_allocate_no_more_than_their_bytes_justify() -> None:
    for frame in originals():  # kernels and caches are loaded before the count begins
        decode(frame)
    tracemalloc.start()
    try:
        for frame in mutants(2000, seed=3):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            outcome(frame)
            assert tracemalloc.get_traced_memory()[1] - before <= 128 * len(frame) + 32_768
    finally:
        tracemalloc.stop()


def test_frames_need_neither_torch_nor_for_identity_numba() -> None:
    code = (
        "import sys, numpy as np, cgx\n"
        "x = np.arange(9, dtype=np.float32)\n"
        "assert (cgx.decode(cgx.encode(x, 'identity')) == x).all()\n"
        "assert not {'torch', 'numba'} & sys.modules.keys()\n"
        "assert np.abs(cgx.decode(cgx.encode(x, 'uniform:8')) - x).max() < 0.1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_frame_size_is_the_sum_of_its_parts() -> None:
    for spec in ALL_UNIFORM[::7]:
        text = len(str(spec))
        payload = compressor_for(spec).row_nbytes(100, "fp32")
        assert len(encode(in_dtype(gradient("normal", 100), "fp32"), spec)) == 28 + 8 + -(-text // 8) * 8 + payload
