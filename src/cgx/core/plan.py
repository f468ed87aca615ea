"""Which spec each parameter uses, and a fingerprint that all ranks must share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from cgx.core.spec import EXACT, PhaseSpecs, Spec, parse_specs
from cgx.core.wire import WIRE_VERSION
from cgx.errors import SpecError

MIN_COMPRESSED_NUMEL = 1024
OFF = "off"  # the plan in which nothing is compressed
How = str | Spec | PhaseSpecs | Mapping[str, "str | Spec | PhaseSpecs"]


@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as plans see it; ``dtype`` is the engine's name of the gradient's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Specs by parameter name, and the settings under which ranks can understand each other."""

    specs: Mapping[str, PhaseSpecs]
    lines: tuple[str, ...]

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ when anything in ``lines`` does."""
        return fingerprint(self.lines)


def fingerprint(lines: Iterable[str]) -> bytes:
    """32-byte digest of lines of text."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=32).digest()


def to_specs(spec: object) -> PhaseSpecs:
    """Reads a spec from text, a spec for both phases, or a pair.

    Raises:
        SpecError: ``spec`` is none of these.
    """
    match spec:
        case str():
            return EXACT if spec == OFF else parse_specs(spec)
        case PhaseSpecs():
            return spec
        case _ if hasattr(spec, "__dataclass_fields__"):
            return PhaseSpecs(spec, spec)  # type: ignore[arg-type]
        case _:
            raise SpecError(f"a spec is text such as 'uniform:4' or a cgx spec object; found {spec!r}")


def is_compressible(parameter: Parameter) -> bool:
    """False for vectors and small tensors: they cost accuracy and save nothing, so they travel exact.

    References:
        CGX (arXiv 2111.08617), section 4: layers of one dimension or under 1024 elements are left out.
    """
    return len(parameter.shape) > 1 and math.prod(parameter.shape) >= MIN_COMPRESSED_NUMEL


def choose_specs(how: How, parameters: Sequence[Parameter]) -> dict[str, PhaseSpecs]:
    """The specs of each parameter.

    Args:
        how: One spec for all, or a mapping from name pattern to spec: first match wins, ``*`` for the rest,
            unmatched parameters stay exact. Small and 1-D tensors stay exact unless a pattern other than ``*`` names
            them.
        parameters: All parameters, in any order.

    Raises:
        SpecError: A spec is invalid or a pattern matches no parameter.

    Example:
        >>> shapes = {"emb": (512, 64), "fc": (64, 64), "b": (64,)}
        >>> parameters = [Parameter(name, shape, "fp32") for name, shape in shapes.items()]
        >>> {k: str(v)[:9] for k, v in choose_specs({"emb": "bf16", "*": "uniform:4"}, parameters).items()}
        {'emb': 'cast:bf16', 'fc': 'uniform:4', 'b': 'identity'}
    """
    rules = how if isinstance(how, Mapping) else {"*": how}
    parsed = [(pattern, to_specs(spec)) for pattern, spec in rules.items()]
    names = [parameter.name for parameter in parameters]
    for pattern, _ in parsed:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(f"pattern {pattern!r} matches no parameter; there are {', '.join(names[:8])}, ...")
    chosen = {}
    for parameter in parameters:
        pattern, specs = next(((p, s) for p, s in parsed if fnmatchcase(parameter.name, p)), ("", EXACT))
        chosen[parameter.name] = specs if pattern not in ("*", "") or is_compressible(parameter) else EXACT
    return chosen


def make_plan(specs: Mapping[str, PhaseSpecs], parameters: Sequence[Parameter], settings: Mapping[str, object]) -> Plan:
    """A plan whose lines say everything that must be equal on all ranks.

    Args:
        specs: Specs by name.
        parameters: In the order that the engine registers them.
        settings: World size, piece size and whatever else decides bytes, by name.
    """
    lines = [f"wire version: {WIRE_VERSION}", *(f"{key}: {value}" for key, value in settings.items())]
    lines += [f"parameter {p.name}: {list(p.shape)} {p.dtype} {specs[p.name]}" for p in parameters]
    return Plan(dict(specs), tuple(lines))
