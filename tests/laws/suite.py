"""The ten laws of `cgx.compressors.base`, each a function that raises AssertionError, and to whom each applies."""

from __future__ import annotations

from collections.abc import Callable

from tests.laws import numbers, payloads
from tests.laws.families import Subject

Law = Callable[[Subject], None]


def _to_all(subject: Subject) -> bool:
    return True


LAWS: dict[str, tuple[Law, Callable[[Subject], bool]]] = {
    "size": (payloads.check_size, _to_all),
    "bound": (numbers.check_bound, _to_all),
    "unbiased": (numbers.check_unbiased, lambda s: s.compressor.guarantees.unbiased),
    "conservation": (numbers.check_conservation, _to_all),
    "fixed_points": (numbers.check_fixed_points, _to_all),
    "determinism": (payloads.check_determinism, _to_all),
    "independence": (payloads.check_independence, _to_all),
    "non_finite": (payloads.check_non_finite, _to_all),
    "fusion": (payloads.check_fusion, _to_all),
    "contraction": (
        numbers.check_contraction,
        lambda s: s.compressor.guarantees.contraction is not None,
    ),
}
