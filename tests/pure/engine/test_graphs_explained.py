"""What `decant bench graphs` says of a load's statistics."""

from __future__ import annotations

from engine.graphs.explain import explain, gains
from engine.graphs.select import Choice, Costs, GraphSelector, GraphStatistics, Mode, Reason, StepDescriptor

COSTS = Costs(
    full={8: 0.004, 64: 0.009},
    piecewise={128: 0.006},
    eager={128: 0.011, 512: 0.014},
    eager_decode={8: 0.009, 64: 0.0092},
)


def counted(*choices: tuple[Choice, int, int]) -> GraphStatistics:
    statistics = GraphStatistics()
    for choice, tokens, times in choices:
        for _ in range(times):
            statistics.count(choice, tokens)
    return statistics


def test_a_bucket_gains_what_eager_steps_of_its_size_would_cost_more() -> None:
    statistics = counted(
        (Choice(Mode.FULL, 8, Reason.NONE), 8, 10),
        (Choice(Mode.PIECEWISE, 128, Reason.PROMPT_CHUNKS), 100, 3),
        (Choice(Mode.EAGER, 700, Reason.PROMPT_CHUNKS), 700, 2),
    )
    full, piecewise = gains(statistics, COSTS)
    assert (full.steps, round(full.saved_s, 6)) == (10, 0.05)
    assert (piecewise.steps, round(piecewise.saved_s, 6)) == (3, 0.015)
    text = "\n".join(explain(statistics, COSTS, load_s=0.1))
    assert "15 steps" in text
    assert "87% as graphs" in text
    assert "prompt_chunks: 5 steps" in text
    assert "65.0% of the load's time" in text
    assert "without gain" not in text


def test_a_high_hit_rate_without_gain_is_explained_by_a_gpu_that_is_busy_anyway() -> None:
    statistics = counted((Choice(Mode.FULL, 64, Reason.NONE), 64, 100))
    text = "\n".join(explain(statistics, COSTS, load_s=0.92))
    assert "100% as graphs" in text
    assert "high hit rate without gain: at 64 tokens the GPU computes for 9.0 ms" in text


def test_a_high_hit_rate_without_gain_is_explained_by_padding() -> None:
    statistics = counted((Choice(Mode.FULL, 64, Reason.NONE), 33, 100))
    assert any("padded rows" in line for line in explain(statistics, COSTS, load_s=0.92))


def test_nothing_counted_is_said() -> None:
    assert list(explain(GraphStatistics(), COSTS, load_s=0.0)) == ["no step was counted"]


def test_a_selectors_statistics_can_be_begun_anew() -> None:
    selector = GraphSelector(COSTS)
    selector.choose(StepDescriptor(8, 8, all_draw=True))
    assert selector.statistics.steps.total() == 1
    selector.forget_statistics()
    assert selector.statistics.steps.total() == 0
    assert selector.costs is COSTS
