"""A node's own last look at what a router asks for."""

from __future__ import annotations

import math

import pytest
from decant_proto.v1 import types_pb2

from engine.port import MOST_BANNED_TOKENS
from node.wire import MOST_LOGPROBS, unsound_sampling

VOCABULARY = 10 * MOST_BANNED_TOKENS


def sampling(bad_words: int, stops: int) -> types_pb2.SamplingParameters:
    words = [types_pb2.TokenSequence(ids=[7]) for _ in range(bad_words)]
    return types_pb2.SamplingParameters(bad_words=words, stop_token_ids=range(stops))


@pytest.mark.parametrize(
    ("bad_words", "stops", "named"),
    [
        (MOST_BANNED_TOKENS - 1, 1, None),
        (MOST_BANNED_TOKENS, 1, "bad_words"),
        (0, MOST_BANNED_TOKENS, None),
        (0, MOST_BANNED_TOKENS + 1, "stop_token_ids"),
    ],
)
def test_f17_more_banned_tokens_than_a_step_has_room_for_are_refused(
    bad_words: int, stops: int, named: str | None
) -> None:
    assert unsound_sampling(sampling(bad_words, stops), VOCABULARY) == named


def test_f17_something_is_left_to_draw() -> None:
    assert unsound_sampling(sampling(4, 4), 9) is None
    assert unsound_sampling(sampling(4, 4), 8) == "bad_words"


def test_more_logprobs_of_each_position_than_a_message_has_room_for_are_refused() -> None:
    asked = types_pb2.SamplingParameters(prompt_logprobs=MOST_LOGPROBS)
    assert unsound_sampling(asked, VOCABULARY) is None
    asked.prompt_logprobs += 1
    assert unsound_sampling(asked, VOCABULARY) == "prompt_logprobs"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e39])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_f17_a_number_that_no_float32_holds_is_refused(field: str, value: float) -> None:
    """By an infinite temperature everything is nothing, and what may not be drawn is NaN, which wins."""
    asked = types_pb2.SamplingParameters()
    setattr(asked, field, value)
    assert unsound_sampling(asked, VOCABULARY) == field
