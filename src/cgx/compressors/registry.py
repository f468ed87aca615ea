"""From a spec to its compressor; adding a codec is one ``register`` line."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cgx.compressors.base import Compressor
from cgx.compressors.cast import CastCompressor
from cgx.compressors.uniform import UniformCompressor
from cgx.core.spec import Cast, Identity, Spec, Uniform
from cgx.errors import SpecError

_FACTORIES: dict[type, Callable[[Any], Compressor]] = {}


def register(spec_type: type, factory: Callable[[Any], Compressor]) -> None:
    """Makes ``compressor_for`` answer specs of ``spec_type`` with ``factory(spec)``."""
    _FACTORIES[spec_type] = factory


register(Identity, CastCompressor)
register(Cast, CastCompressor)
register(Uniform, UniformCompressor)


@cache
def compressor_for(spec: Spec) -> Compressor:
    """The compressor of a spec.

    Raises:
        SpecError: No codec is registered for the type of ``spec``.
    """
    factory = _FACTORIES.get(type(spec))
    if factory is None:
        known = ", ".join(sorted(t.__name__ for t in _FACTORIES))
        raise SpecError(f"no codec is registered for {spec!r}; registered spec types: {known}")
    return factory(spec)
