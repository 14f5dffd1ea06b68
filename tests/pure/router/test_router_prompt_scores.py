"""Log probabilities of a prompt at the router: each position once, whatever runs they come in; what does not fit is left."""

from __future__ import annotations

import pytest
from decant_proto.v1 import types_pb2
from hypothesis import given
from hypothesis import strategies as st

from router import prompt_scores
from router.prompt_scores import PromptScores

PROMPT_TOKENS = 12


def run(position: int, count: int, best: int = 2) -> types_pb2.PromptLogprobs:
    """What is said of a position depends on nothing but the position."""
    where = range(position, position + count)
    return types_pb2.PromptLogprobs(
        position=position,
        logprobs=[-float(at) for at in where],
        ranks=list(where),
        top_token_ids=[100 * at + place for at in where for place in range(best)],
        top_logprobs=[-0.5 * place for _ in where for place in range(best)],
    )


def whole() -> PromptScores:
    scores = PromptScores(PROMPT_TOKENS)
    scores.take(run(1, PROMPT_TOKENS - 1))
    return scores


@given(st.lists(st.tuples(st.integers(0, PROMPT_TOKENS), st.integers(0, PROMPT_TOKENS)), max_size=12))
def test_runs_that_overlap_or_come_twice_give_each_position_once(cuts: list[tuple[int, int]]) -> None:
    scores = PromptScores(PROMPT_TOKENS)
    for position, count in cuts:
        scores.take(run(position, count))
    known = list(scores)
    assert known == list(whole())[: len(known)]
    assert scores.complete is (len(known) == PROMPT_TOKENS - 1)


def test_a_run_that_leaves_positions_out_or_goes_beyond_the_prompt_changes_nothing() -> None:
    scores = PromptScores(PROMPT_TOKENS)
    uneven = run(1, 3)
    uneven.ranks.append(1)
    for wrong in (run(2, 3), run(1, PROMPT_TOKENS), run(0, 3), types_pb2.PromptLogprobs(), uneven):
        scores.take(wrong)
    assert not list(scores)
    assert not scores.complete


def test_a_prompt_of_one_token_has_nothing_to_be_scored() -> None:
    assert PromptScores(1).complete


def test_they_go_on_as_runs_that_do_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "RUN_TOKENS", 4)
    runs = list(whole().runs())
    assert [(one.position, len(one.logprobs)) for one in runs] == [(1, 4), (5, 4), (9, 3)]
    again = PromptScores(PROMPT_TOKENS)
    for one in runs:
        again.take(one)
    assert list(again) == list(whole())
