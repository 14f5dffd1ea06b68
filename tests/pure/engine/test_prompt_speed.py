"""An engine's own measure of how fast it computes prompts."""

from __future__ import annotations

import pytest

from engine.speed import LEAST_TOKENS, PromptSpeed


def test_overlapped_steps_count_no_time_twice() -> None:
    speed = PromptSpeed()
    speed.settled(100, launched_s=10.0, now_s=10.5)
    assert speed.tokens_per_second == pytest.approx(200)
    speed.settled(100, launched_s=10.1, now_s=11.0)  # launched while the one before still ran
    assert speed.tokens_per_second == pytest.approx(200)


def test_decodes_say_nothing_of_prompts() -> None:
    speed = PromptSpeed()
    speed.settled(LEAST_TOKENS - 1, launched_s=0.0, now_s=1.0)
    assert speed.tokens_per_second == 0


def test_the_newest_steps_count_most_and_none_counts_alone() -> None:
    speed = PromptSpeed()
    speed.settled(1000, launched_s=0.0, now_s=1.0)
    speed.settled(1000, launched_s=1.0, now_s=3.0)
    assert 500 < speed.tokens_per_second < 1000
    for step in range(3, 60, 2):
        speed.settled(1000, launched_s=step, now_s=step + 2)
    assert speed.tokens_per_second == pytest.approx(500, rel=0.01)
