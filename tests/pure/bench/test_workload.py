"""Arrivals and lengths come from seeds alone, at the rates and with the distribution that they claim."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from bench.serving.fleet import sum_of_samples
from bench.serving.loads import LoadPlan, schedule
from bench.serving.workload import ConversationLengths, FixedLengths, Shape, poisson_arrivals, prompt_of

FIXED = FixedLengths(Shape(2048, 256))


def test_arrivals_are_poisson_within_their_window_and_equal_for_equal_seeds() -> None:
    arrivals = poisson_arrivals(50.0, 100.0, FIXED, seed=3, start_s=7.0)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] >= 7.0
    assert times[-1] < 107.0
    assert len(arrivals) == pytest.approx(5000, abs=5 * 5000**0.5)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)
    assert arrivals == poisson_arrivals(50.0, 100.0, FIXED, seed=3, start_s=7.0)
    assert arrivals != poisson_arrivals(50.0, 100.0, FIXED, seed=4, start_s=7.0)


def test_conversations_have_the_lengths_of_the_trace() -> None:
    generator, lengths = np.random.default_rng(1), ConversationLengths()
    drawn = [lengths.draw(generator) for _ in range(20_000)]
    assert statistics.fmean(shape.prompt_tokens for shape in drawn) == pytest.approx(1155, rel=0.05)
    assert statistics.fmean(shape.output_tokens for shape in drawn) == pytest.approx(211, rel=0.08)
    assert statistics.median(shape.prompt_tokens for shape in drawn) == pytest.approx(1020, rel=0.05)
    assert statistics.median(shape.output_tokens for shape in drawn) == pytest.approx(129, rel=0.1)
    assert min(shape.output_tokens for shape in drawn) >= 2


def test_every_seed_has_a_window_at_every_rate_and_warm_up_belongs_to_nobody() -> None:
    plan = LoadPlan(FIXED, rates=(20.0, 40.0), seeds=(1, 2, 3), warm_s=1.0, window_s=5.0)
    arrivals, owners = schedule(plan)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    for rate, begins_s in ((20.0, 0.0), (40.0, 16.0)):
        for place, seed in enumerate(plan.seeds):
            window = [time for time, owner in zip(times, owners, strict=True) if owner == (rate, seed)]
            first_s = begins_s + 1.0 + 5.0 * place
            assert window, (rate, seed)
            assert all(first_s <= time < first_s + 5.0 for time in window)
    assert sum(owner is None for owner in owners) == pytest.approx(60, abs=40)
    assert len({arrival.prompt_seed for arrival in arrivals}) == len(arrivals), "no prompt comes twice"


def test_prompts_never_hold_the_token_that_ends_an_answer() -> None:
    assert max(prompt_of(10_000, 1, 100)) == 98


def test_samples_of_an_exposition_are_summed_by_their_labels() -> None:
    text = (
        "# TYPE decant_staging_slots gauge\n"
        'decant_staging_slots{state="free"} 3.0\n'
        'decant_staging_slots{state="sending"} 2.0\n'
        "decant_staging_slots_other 9.0\n"
        "decant_kv_transfer_bytes_total 1e+09\n"
    )
    assert sum_of_samples(text, "decant_staging_slots") == 5.0
    assert sum_of_samples(text, "decant_staging_slots", state="sending") == 2.0
    assert sum_of_samples(text, "decant_kv_transfer_bytes_total") == 1e9
    assert sum_of_samples(text, "decant_nothing") == 0.0
