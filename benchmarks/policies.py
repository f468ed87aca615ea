"""What a spec for each layer saves: bytes of every policy at the error of `uniform:4`, on a small GPT's gradients.

The gradients are those of `benchmarks/rate_distortion.py`. Tables come from the ranges of blocks
(`cgx.policies.expected`), in two metrics: absolute squared error, and squared error relative to each tensor's own
energy. The budget is what `uniform:4` loses. Choices made at one step are then measured through the codec, at that step
and at a later one:

smaller     bytes of `uniform:4` / bytes of the choice, over the layers that are compressed
predicted   error of the choice / error of `uniform:4`, by the table
measured    the same, measured at the step of the choice
later       the same, measured at the later step

Run it with `python -m benchmarks.policies`; it takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rate_distortion import Floats, OnePass, State, owned_parts, states
from cgx.cli.demo.models import find_tasks
from cgx.core.plan import choose_specs, is_compressible
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.spec import EXACT, PhaseSpecs, Uniform
from cgx.policies.base import Layer, Policy, Table, choose
from cgx.policies.bayesian import Bayesian
from cgx.policies.by_size import BySize
from cgx.policies.expected import Ranges, gather_ranges, predict_mean_error, predict_nbytes
from cgx.policies.kimad import KimadPlus
from cgx.policies.kmeans import KMeans
from cgx.policies.l_greco import LGreco
from cgx.policies.linear import Linear
from cgx.policies.uniform import SameForAll

RANKS = 8
DECIDED, LATER = 70, 130
BITS = range(2, 9)
BLOCK = 128
EQUAL = tuple(PhaseSpecs(Uniform(bits), Uniform(bits)) for bits in BITS)
PAIRS = tuple(PhaseSpecs(Uniform(one), Uniform(two)) for one, two in itertools.product(BITS, BITS))
DEFAULT = PhaseSpecs(Uniform(4), Uniform(4))
POLICIES: tuple[Policy, ...] = (SameForAll(), BySize(), Linear(), KMeans(), Bayesian(), LGreco())


def slices(state: State) -> dict[str, slice]:
    """Where each compressed layer lies in the flat gradient."""
    ends = np.cumsum([int(np.prod(p.shape)) for p in state.parameters]).tolist()
    return {
        p.name: slice(start, end)
        for p, start, end in zip(state.parameters, [0, *ends], ends, strict=False)
        if is_compressible(p)
    }


def ranges_of(x: NDArray[Any]) -> Ranges:
    """What the closed forms need of one tensor."""
    starts = np.arange(0, len(x), BLOCK)
    low, high = np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)
    weight = np.diff(np.append(starts, len(x))).astype(np.float64)
    return gather_ranges(low, high, weight, block_size=BLOCK, energy=float(np.dot(x, x)))


def weight_of(metric: str, mean: NDArray[np.float64]) -> float:
    """What a squared error in this layer counts."""
    return 1.0 if metric == "absolute" else 1 / max(float(np.dot(mean, mean)), 1e-300)


def table_of(state: State, candidates: tuple[PhaseSpecs, ...], metric: str) -> Table:
    """Bytes and expected errors of all compressed layers."""
    layers = []
    for name, part in slices(state).items():
        mean = state.means[RANKS][part]
        each = [ranges_of(x[part].astype(np.float64)) for x in state.gradients]
        average = Ranges(
            float(np.mean([r.energy for r in each])), {BLOCK: float(np.mean([r.squared[BLOCK] for r in each]))}
        )
        of_mean, weight = ranges_of(mean), weight_of(metric, mean)
        errors = [weight * predict_mean_error(specs, average, of_mean, world_size=RANKS) for specs in candidates]
        nbytes = [predict_nbytes(specs, len(mean), world_size=RANKS) for specs in candidates]
        layers.append(Layer(name, len(mean), float(np.linalg.norm(mean)), tuple(nbytes), tuple(errors)))
    return Table(candidates, candidates.index(DEFAULT), tuple(layers))


def measure(state: State, specs: Mapping[str, PhaseSpecs], metric: str) -> float:
    """Error of the reduced mean through the codec: the owner's part exact, the others' decoded, the sum encoded."""
    chosen = {p.name: specs.get(p.name, EXACT) for p in state.parameters}
    scatter = OnePass({name: PhaseSpecs(each.scatter, each.scatter) for name, each in chosen.items()}, state.parameters)
    gather = OnePass({name: PhaseSpecs(each.gather, each.gather) for name, each in chosen.items()}, state.parameters)
    total, decoded = np.zeros(scatter.numel, np.float32), np.zeros(scatter.numel, np.float32)
    for rank, x in enumerate(state.gradients):
        scatter(x, decoded, index=state.step, sender=stream(SCATTER, rank))
        for part in owned_parts(scatter.segments, rank, RANKS):
            decoded[part] = x[part]
        total += decoded
    out: Floats = np.zeros_like(total)
    gather(total * np.float32(1 / RANKS), out, index=state.step, sender=stream(GATHER, 0))
    mean = state.means[RANKS]
    return sum(
        weight_of(metric, mean[part]) * float(np.square(out[part] - mean[part]).sum())
        for part in slices(state).values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", help="one of the demo's models")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = find_tasks([options.model])[options.model]
    decided, later = states(options.model, task, {DECIDED: RANKS, LATER: RANKS})
    default = choose_specs(DEFAULT, decided.parameters)
    if not options.json:
        print(f"{task.title}, {RANKS} ranks, decided at step {DECIDED}, later {LATER}\n")
        print("| metric | candidates | policy | smaller | predicted | measured | later | seconds |")
        print("|---|---|---|---:|---:|---:|---:|---:|")
    for metric, candidates in itertools.product(("absolute", "relative"), (EQUAL, PAIRS)):
        table = table_of(decided, candidates, metric)
        whole = table.nbytes_of(table.default_choice)
        now, then = (measure(state, default, metric) for state in (decided, later))
        for policy in (*POLICIES, KimadPlus()):
            started = time.perf_counter()
            choice = policy.choose(table, whole) if isinstance(policy, KimadPlus) else choose(policy, table)
            seconds, specs = time.perf_counter() - started, choice.specs(table)
            row = {
                "metric": metric,
                "candidates": len(candidates),
                "policy": type(policy).__name__,
                "smaller": whole / choice.nbytes,
                "predicted": choice.error / table.default_error,
                "measured": measure(decided, specs, metric) / now,
                "later": measure(later, specs, metric) / then,
                "seconds": seconds,
            }
            cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]
            print(json.dumps(row) if options.json else "| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
