"""docs/wire-format.md tells the truth: its example is what the code writes, and can be read by what the page says."""

from __future__ import annotations

import re

import numpy as np

from cgx.core.wire import MAGIC, WIRE_VERSION
from tests.golden import example, plain

PAGE = example.PAGE.read_text(encoding="utf-8")


def test_example_is_what_the_code_writes() -> None:
    wire, *_ = example.payload()
    assert example.bytes_of(PAGE) == wire.tobytes()
    assert example.with_example(PAGE) == PAGE


def test_plain_decoder_reads_the_example() -> None:
    payload = example.bytes_of(PAGE)
    assert plain.head(payload) == (MAGIC, WIRE_VERSION, len(payload), example.TAG)
    key = plain.payload_key(
        name=example.NAME, seed=example.SEED, reduction=example.REDUCTION, phase=example.PHASE,
        sender=example.SENDER,
    )  # fmt: skip
    row = plain.Row(str(example.SPEC), example.NUMEL, "fp32", key, 0)
    _, decoded, *_ = example.payload()
    assert np.array(row.decode(payload[16:]), np.float32).tobytes() == decoded.tobytes()


def test_page_names_the_version_in_use() -> None:
    assert re.search(rf"^# The wire format, version {WIRE_VERSION}$", PAGE, re.MULTILINE)
