"""Which way a step runs: only where it is correct, and where it costs least."""

from __future__ import annotations

from engine.graphs.select import Choice, Costs, GraphSelector, Mode, Reason, StepDescriptor, decode_buckets

COSTS = Costs(
    full={1: 4.4, 2: 4.5, 8: 4.6, 64: 9.0},
    piecewise={64: 5.0, 256: 8.0},
    eager={1: 9.0, 64: 9.0, 256: 9.5, 1024: 24.0},
    eager_decode={1: 9.0, 64: 12.0},
)


def decodes(rows: int, **changes: bool) -> StepDescriptor:
    return StepDescriptor(rows, rows, all_draw=changes.get("all_draw", True))


def test_decodes_take_the_smallest_captured_batch_that_holds_them() -> None:
    selector = GraphSelector(COSTS)
    assert selector.choose(decodes(1)) == Choice(Mode.FULL, 1, Reason.NONE)
    assert selector.choose(decodes(3)) == Choice(Mode.FULL, 8, Reason.NONE)
    assert selector.choose(decodes(64)) == Choice(Mode.FULL, 64, Reason.NONE)
    assert selector.statistics.padded_tokens == 5
    assert selector.statistics.steps == {(Mode.FULL, 1): 1, (Mode.FULL, 8): 1, (Mode.FULL, 64): 1}


def test_what_a_full_graph_cannot_hold_never_runs_as_one() -> None:
    selector = GraphSelector(COSTS)
    assert selector.choose(decodes(3, all_draw=False)) == Choice(Mode.PIECEWISE, 64, Reason.SILENT_ROWS)
    assert selector.choose(StepDescriptor(70, 3, all_draw=True)) == Choice(Mode.PIECEWISE, 256, Reason.PROMPT_CHUNKS)
    assert selector.choose(decodes(65)) == Choice(Mode.PIECEWISE, 256, Reason.NO_BUCKET)


def test_a_step_beyond_all_buckets_runs_eagerly_and_adds_none() -> None:
    selector = GraphSelector(COSTS)
    for tokens in range(257, 5000, 13):
        assert selector.choose(StepDescriptor(tokens, 0, all_draw=True)) == Choice(
            Mode.EAGER, tokens, Reason.PROMPT_CHUNKS
        )
    assert set(selector.statistics.steps) == {(Mode.EAGER, 0)}


def test_the_cheapest_of_the_correct_ways_is_taken() -> None:
    padding_is_dear = GraphSelector(Costs(full={64: 9.0}, eager_decode={1: 3.0, 64: 9.5}))
    assert padding_is_dear.choose(decodes(2)) == Choice(Mode.EAGER, 2, Reason.DEARER)
    assert padding_is_dear.choose(decodes(64)).mode is Mode.FULL
    piecewise_is_dear = GraphSelector(Costs(piecewise={256: 12.0}, eager={1: 3.0, 256: 10.0}))
    assert piecewise_is_dear.choose(StepDescriptor(200, 0, all_draw=True)).mode is Mode.EAGER
    between = GraphSelector(Costs(piecewise={64: 5.0, 256: 8.0}, eager={64: 4.0, 256: 9.0}))
    assert between.choose(StepDescriptor(60, 0, all_draw=True)).mode is Mode.EAGER
    assert between.choose(StepDescriptor(255, 0, all_draw=True)).mode is Mode.PIECEWISE


def test_without_anything_captured_every_step_is_eager() -> None:
    selector = GraphSelector(Costs())
    assert selector.choose(decodes(5)) == Choice(Mode.EAGER, 5, Reason.NO_BUCKET)
    assert selector.choose(StepDescriptor(50, 1, all_draw=False)).mode is Mode.EAGER


def test_decode_buckets_are_few_and_hold_every_batch() -> None:
    for most in (1, 3, 24, 64, 100, 256, 1000):
        buckets = decode_buckets(most)
        assert buckets[-1] == most
        assert list(buckets) == sorted(set(buckets))
    assert len(decode_buckets(256)) <= 20
