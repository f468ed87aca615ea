"""Tables to choose from: small ones with any numbers in them, and ones that look like a model's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from cgx.core.spec import PhaseSpecs, Uniform
from cgx.policies.base import Layer, Policy, Table
from cgx.policies.bayesian import Bayesian
from cgx.policies.by_size import BySize
from cgx.policies.kmeans import KMeans
from cgx.policies.l_greco import LGreco
from cgx.policies.linear import Linear
from cgx.policies.uniform import SameForAll

BITS = tuple(range(2, 9))
CANDIDATES = tuple(PhaseSpecs(Uniform(bits), Uniform(bits)) for bits in BITS)
FOUR = BITS.index(4)
POLICIES: dict[str, Policy] = {
    "same_for_all": SameForAll(),
    "by_size": BySize(),
    "linear": Linear(),
    "kmeans": KMeans(),
    "bayesian": Bayesian(evaluations=4),
    "l_greco": LGreco(),
    "l_greco with fewer cells than layers": LGreco(cells=2),
}

anything = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, math.nan, math.inf, 5e-324, 1e308]))
errors = st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1.0, 2.0]))


@st.composite
def tables(draw: st.DrawFn, error: st.SearchStrategy[float] = errors, *, layers: int = 4) -> Table:
    """Draw a table of up to `layers` layers and 4 candidates; bytes and errors need not be related."""
    count, default = draw(st.sampled_from([(c, d) for c in range(1, 5) for d in range(c)]))
    layer = st.builds(
        Layer,
        name=st.just("layer"),
        numel=st.integers(0, 5),
        norm=st.floats(0, 2),
        nbytes=st.tuples(*[st.integers(0, 20)] * count),
        errors=st.tuples(*[error] * count),
    )
    return Table(CANDIDATES[:count], default, tuple(draw(st.lists(layer, max_size=layers))))


def layer_like(name: str, numel: int, norm: float, factor: float = 1.0) -> Layer:
    """A layer whose every bit quarters the error and costs an eighth of a byte per element."""
    return Layer(
        name,
        numel,
        norm,
        tuple(numel * (4 * bits + 1) // 16 for bits in BITS),
        tuple(factor * norm**2 / (2**bits - 1) ** 2 for bits in BITS),
    )


def model_like(layers: int, *, seed: int = 0) -> Table:
    """Layers of many sizes, whose norms per element differ by orders of magnitude."""
    rng = np.random.default_rng(seed)
    sizes = (128 * 2 ** rng.uniform(3, 14, layers)).astype(int).tolist()
    norms = (10 ** rng.normal(-2, 0.7, layers) * np.sqrt(sizes)).tolist()
    factors = rng.lognormal(0, 0.3, layers).tolist()
    rows = zip(sizes, norms, factors, strict=True)
    return Table(CANDIDATES, FOUR, tuple(layer_like(f"l{i}", *row) for i, row in enumerate(rows)))


def every_choice(table: Table) -> Iterator[Sequence[int]]:
    """All ways to give each layer a candidate."""
    return itertools.product(range(len(table.candidates)), repeat=len(table.layers))


def least_nbytes(table: Table, max_error: float) -> float:
    """Fewest bytes of any choice within the budget, infinite when there is none."""
    return min(
        (table.nbytes_of(each) for each in every_choice(table) if table.error_of(each) <= max_error), default=math.inf
    )


def least_error(table: Table, max_nbytes: float) -> float:
    """Least error of any choice within the budget, infinite when there is none."""
    return min(
        (table.error_of(each) for each in every_choice(table) if table.nbytes_of(each) <= max_nbytes), default=math.inf
    )
