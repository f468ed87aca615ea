"""docs/frame-format.md tells the truth: its example is what the code writes, and can be read by what the page says."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np

from cgx.compressors.frame import DTYPES, FRAME_VERSION, decode, encode
from tests.golden import plain
from tests.strategies import Floats

PAGE = (Path(__file__).parents[2] / "docs" / "frame-format.md").read_text(encoding="utf-8")
KEY = 0x0123456789ABCDEF


def array() -> Floats:
    i = np.arange(40)
    return ((i * i % 32 - 12) / 8).astype(np.float32).reshape(5, 8)


def frame_on_the_page() -> bytes:
    found = re.search(r"<!-- example -->\n(.*?)<!-- end of example -->", PAGE, re.DOTALL)
    assert found is not None, "the page has lost its example"
    lines: list[str] = re.findall(r"^((?:[0-9a-f]{2} ?)+) {2,}", found[1], re.MULTILINE)
    return bytes.fromhex("".join(lines))


def test_example_is_what_the_code_writes() -> None:
    assert encode(array(), "uniform:4/block=32", key=KEY).hex(" ") == frame_on_the_page().hex(" ")


def test_plain_decoder_reads_the_example_by_the_page_alone() -> None:
    frame = frame_on_the_page()
    magic, version, dtype, ndim, text_nbytes, key, payload_nbytes = struct.unpack_from("<4sBBBBQQ", frame)
    assert (magic, version, dtype, key) == (b"CGXF", 1, 1, KEY)
    assert struct.unpack_from(f"<{ndim}Q", frame, 24) == (5, 8)
    text_at = 24 + 8 * ndim
    start = text_at + -(-text_nbytes // 8) * 8
    assert start + payload_nbytes + 4 == len(frame)
    assert struct.unpack("<I", frame[-4:]) == (zlib.crc32(frame[:-4]),)
    payload_key = plain.mix64(key + 0x9E3779B97F4A7C15)
    row = plain.Row(frame[text_at : text_at + text_nbytes].decode("ascii"), 40, "fp32", payload_key, 0)
    values = np.array(row.decode(frame[start:-4]), np.float32).reshape(5, 8)
    assert values.tobytes() == decode(frame).tobytes()


def test_page_names_the_version_and_every_dtype() -> None:
    assert re.search(rf"^# The frame format, version {FRAME_VERSION}$", PAGE, re.MULTILINE)
    section = PAGE[PAGE.index("## 2.") : PAGE.index("## 3.")]
    on_the_page = {int(code): name for code, name in re.findall(r"(\d+) \| ([a-z]+\d*)", section)}
    numpy_names = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "fp64": "<f8", "boolean": "|b1"}
    assert {
        code: numpy_names.get(name) or np.dtype(name).newbyteorder("<").str for code, name in on_the_page.items()
    } == DTYPES
