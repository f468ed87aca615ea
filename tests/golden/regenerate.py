"""Rewrites the golden file and the worked example of docs/wire-format.md: `python -m tests.golden.regenerate`.

Only together with a new WIRE_VERSION, and after a look at the difference.
"""

from __future__ import annotations

from tests.golden import example, oracle


def main() -> None:
    """Write both files."""
    oracle.FILE.write_text(oracle.text_of(oracle.records()), encoding="utf-8")
    page = example.PAGE.read_text(encoding="utf-8")
    example.PAGE.write_text(example.with_example(page), encoding="utf-8")


if __name__ == "__main__":
    main()
