"""One request with many prompts: what it asks for is looked at once, and each prompt has its own room and seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, models

from router.generation import RequestRefused, SamplingWishes
from router.intake import Intake
from router.tokenizer import ModelText

CONTEXT = 64
VOCABULARY = 32


class Looked(list[int]):
    """Counts how often all of it is looked at."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def intake() -> Intake:
    text = ModelText(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), vocabulary_size=VOCABULARY)
    return Intake("model", text, lambda: CONTEXT, 60.0)


def times_looked(prompts: int) -> int:
    allowed = Looked(range(VOCABULARY))
    generations = intake().generations([(0,)] * prompts, SamplingWishes(allowed_token_ids=allowed))
    assert all(len(one.sampling.allowed_token_ids) == VOCABULARY for one in generations)
    return allowed.times


def test_a_list_is_looked_at_as_often_for_many_prompts_as_for_one() -> None:
    assert times_looked(100) == times_looked(1) > 0


def test_each_prompt_has_the_room_that_it_leaves_and_a_seed_of_its_own() -> None:
    prompts = [(0,) * length for length in (1, 63, 40)]
    generations = intake().generations(prompts, SamplingWishes(), default_max_tokens=30)
    assert [one.sampling.max_tokens for one in generations] == [30, 1, 24]
    assert len({one.sampling.seed for one in generations}) == len(prompts)
    assert {one.sampling.seed for one in intake().generations(prompts, SamplingWishes(seed=7))} == {7}


def test_whoever_wants_more_than_a_message_holds_is_told_what_the_context_holds() -> None:
    with pytest.raises(RequestRefused, match=f"context holds {CONTEXT} tokens"):
        intake().generations([(0,)], SamplingWishes(max_tokens=1 << 32))
