"""Error feedback over many steps: what was sent and what is left add up to what went in."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.collectives.base import Op
from cgx.core.segments import Segment
from tests.conformance.models import SUPPRESSED, inputs_of, mixed, of_sizes, segment
from tests.conformance.ranks import Array, Settings, reduce_on_threads
from tests.strategies import Floats

STEPS = 12


def sent_and_left(segments: list[Segment], inputs: list[list[dict[str, Array]]]) -> tuple[Floats, Floats]:
    """Run all steps on two ranks of which rank 1 sends zeros.

    What rank 1 then holds of its own chunk is what rank 0 sent, decoded: zeros come back as zeros and phase two is
    exact. Returns the sum of that over all steps, and rank 0's residual, both in the order of the arena.
    """
    residuals = [np.zeros(sum(s.numel for s in segments), np.float32) for _ in range(2)]
    sent = np.zeros(len(residuals[0]), np.float64)
    for step, ranks in enumerate(inputs):
        results = reduce_on_threads(ranks, segments, Settings(reduction_index=step), residuals=residuals)
        assert all(result.error is None for result in results), results[0].error
        sent += np.concatenate([results[1].values[s.name].astype(np.float64) for s in segments])
    assert not residuals[1].any()
    return sent, residuals[0]


@pytest.mark.parametrize("specs", ["uniform:1", "uniform:2/rounding=nearest", "uniform:4/rounding=stochastic", "bf16"])
@pytest.mark.parametrize("pattern", ["normal", "magnitudes", "shifted"])
def test_what_was_sent_and_what_is_left_add_up_to_what_went_in(specs: str, pattern: str) -> None:
    segments = of_sizes(f"{specs}+identity")
    inputs = [inputs_of(segments, 2, pattern=pattern, seed=step) for step in range(STEPS)]
    for step in inputs:
        step[1] = {name: np.zeros_like(values) for name, values in step[1].items()}
    sent, left = sent_and_left(segments, inputs)
    put_in = np.concatenate(
        [sum(step[0][s.name].astype(np.float64) for step in inputs) for s in segments]  # type: ignore[arg-type]
    )
    mine = np.concatenate([np.repeat(s.owners(2) == 0, s.stripe_numel)[: s.numel] for s in segments])
    assert not left[mine].any(), "a rank's own chunk is not encoded and leaves nothing"
    assert left[~mine].any()
    # Each step rounds the sum with the residual and the difference: 2 ulp of the largest element that can occur.
    largest = max(np.abs(step[0][s.name]).max(initial=0) for step in inputs for s in segments) * 4
    off = np.abs(sent + left - put_in)
    assert off[~mine].max() <= STEPS * 2 * largest * 2.0**-23
    # The control: without the residual it does not add up.
    assert np.abs(sent - put_in)[~mine].max() > STEPS * 2 * largest * 2.0**-23


@pytest.mark.parametrize("specs", ["uniform:1", "uniform:2/rounding=nearest", "uniform:4/rounding=stochastic", "bf16"])
def test_one_shot_reductions_leave_with_each_rank_what_its_own_encoding_lost(specs: str) -> None:
    # No second phase loses anything: all that was put in is in the results or in some rank's residual.
    segments, world = of_sizes(specs), 3
    numel = sum(s.numel for s in segments)
    residuals = [np.zeros(numel, np.float32) for _ in range(world)]
    off, largest = np.zeros(numel), 0.0
    for step in range(STEPS):
        inputs = inputs_of(segments, world, seed=step)
        asked = Settings(reduction_index=step, algorithm="all_gather")
        results = reduce_on_threads(inputs, segments, asked, residuals=residuals)
        assert all(result.error is None for result in results), results[0].error
        got, *put_in = (
            np.concatenate([values[s.name].astype(np.float64) for s in segments])
            for values in (results[0].values, *inputs)
        )
        off += sum(put_in) - got
        largest = max(largest, *(float(np.abs(part).max()) for part in put_in))
    left = np.sum([residual.astype(np.float64) for residual in residuals], axis=0)
    # Each step rounds every rank's sum with its residual, the difference, and the sum over ranks.
    allowed = STEPS * world * 3 * (4 * world * largest) * 2.0**-23
    assert all(residual.any() for residual in residuals)
    assert np.abs(off - left).max() <= allowed
    assert np.abs(off).max() > allowed, "the control: without the residuals it does not add up"


@pytest.mark.parametrize("with_feedback", [True, False])
def test_feedback_makes_the_mean_of_biased_steps_right(with_feedback: bool) -> None:
    # Two bits, rounded to nearest: the same gradient again and again loses the same part again and again.
    segments = of_sizes("uniform:2/rounding=nearest+identity", sizes=[8192])
    name, steps = segments[0].name, 20
    inputs = inputs_of(segments, 2, seed="biased")
    exact = inputs[0][name].astype(np.float64) + inputs[1][name]
    residuals = [np.zeros(8192, np.float32) for _ in range(2)] if with_feedback else None
    total = np.zeros(8192)
    for step in range(steps):
        results = reduce_on_threads(inputs, segments, Settings(reduction_index=step), residuals=residuals)
        total += results[0].values[name]
    error = np.abs(total / steps - exact).mean() / np.abs(exact).mean()
    assert error < 0.05 if with_feedback else error > 0.3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_poisoned_block_leaves_no_residual_and_spares_the_others(bad: float) -> None:
    segments = [segment("w", 2 * 4096, "uniform:2+identity")]
    inputs = inputs_of(segments, 2)
    other = int(np.flatnonzero(segments[0].owners(2) == 1)[0]) * 4096  # owned by rank 1, so rank 0 sends it
    clean = [np.zeros(2 * 4096, np.float32) for _ in range(2)]
    dirty = [arena.copy() for arena in clean]
    reduce_on_threads(inputs, segments, Settings(), residuals=clean)
    inputs[0]["w"][other + 130] = bad
    reduce_on_threads(inputs, segments, Settings(), residuals=dirty)
    block = slice(other + 128, other + 256)
    assert not dirty[0][block].any()
    assert clean[0][block].any()
    dirty[0][block] = clean[0][block]
    assert [a.tobytes() for a in clean] == [a.tobytes() for a in dirty]
    # One clean step later nothing of it is left.
    inputs[0]["w"][other + 130] = 1
    dirty[0][block] = 0
    (result, _) = reduce_on_threads(inputs, segments, Settings(reduction_index=1), residuals=dirty)
    assert np.isfinite(result.values["w"]).all()


def test_means_and_mixed_specs_keep_residuals_of_the_unscaled_gradient() -> None:
    # Phase one sends the gradient as it is and the owner divides, so sums and means leave the same residual.
    segments = [s for s in mixed() if s.specs != SUPPRESSED]
    left = []
    for op in Op:
        residuals = [np.zeros(sum(s.numel for s in segments), np.float32) for _ in range(3)]
        reduce_on_threads(inputs_of(segments, 3), segments, Settings(op), residuals=residuals)
        left.append([arena.tobytes() for arena in residuals])
    assert left[0] == left[1]
