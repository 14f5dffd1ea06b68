"""Lists of allowed tokens and bad words, in overlapped batches and on both kinds of node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from test_grammar import PROMPT, Toy

from engine.port import FinishReason, Mode, RequestKey, SamplingParameters, Submit
from engine.scheduler import masks


def drawn(folder: Path, *asked: SamplingParameters, overlap: bool = True) -> list[list[int]]:
    toy = Toy(folder, overlap=overlap)
    for number, sampling in enumerate(asked):
        toy.submit(str(number), sampling)
    toy.rest()
    return [toy.tokens[str(number)] for number in range(len(asked))]


@pytest.mark.parametrize("overlap", [True, False])
def test_only_allowed_tokens_are_drawn_and_neighbours_notice_nothing(tmp_path: Path, overlap: bool) -> None:
    allowed = SamplingParameters(
        seed=2, max_tokens=40, temperature=1.0, ignore_eos=True, allowed_token_ids=(65, 66, 200)
    )
    free = SamplingParameters(seed=3, max_tokens=40, temperature=1.0, ignore_eos=True)
    held, beside = drawn(tmp_path / "both", allowed, free, overlap=overlap)
    (alone,) = drawn(tmp_path / "alone", free, overlap=overlap)
    assert set(held) == {65, 66, 200}
    assert beside == alone


def test_a_list_of_allowed_tokens_is_looked_at_once_however_long_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=masks._list_mask)
    monkeypatch.setattr(masks, "_list_mask", made)
    lists = [(65, 66), (67, 200)]
    asked = [SamplingParameters(seed=2, max_tokens=9, ignore_eos=True, allowed_token_ids=allowed) for allowed in lists]
    answers = drawn(tmp_path, *asked)
    assert [set(answer) <= set(allowed) for answer, allowed in zip(answers, lists, strict=True)] == [True, True]
    assert made.call_args_list == [call(allowed) for allowed in lists]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_word_never_stands_in_the_answer_but_its_beginning_may(tmp_path: Path, overlap: bool) -> None:
    free = SamplingParameters(
        seed=4, max_tokens=60, temperature=1.0, ignore_eos=True, allowed_token_ids=(65, 66, 67, 68)
    )
    words = ((65, 66), (67, 67, 67), (66, 65, 65))
    (usual,) = drawn(tmp_path / "free", free, overlap=overlap)
    (found,) = drawn(tmp_path / "bad", _with(free, words), overlap=overlap)

    def stands(word: tuple[int, ...], answer: list[int]) -> bool:
        return any(tuple(answer[at : at + len(word)]) == word for at in range(len(answer)))

    assert any(stands(word, usual) for word in words)
    assert not any(stands(word, found) for word in words)
    assert stands((67, 67), found)
    assert len(found) == 60


def test_a_bad_word_of_one_token_is_never_drawn(tmp_path: Path) -> None:
    free = SamplingParameters(seed=4, max_tokens=50, temperature=0.0, ignore_eos=True)
    (usual,) = drawn(tmp_path / "free", free)
    (found,) = drawn(tmp_path / "bad", _with(free, ((usual[0],), (usual[5],))))
    assert not {usual[0], usual[5]} & set(found)


def test_the_beginning_of_a_bad_word_may_have_come_before_a_failover(tmp_path: Path) -> None:
    asked = _with(
        SamplingParameters(seed=4, max_tokens=20, temperature=1.0, ignore_eos=True, allowed_token_ids=(65, 66, 67, 68)),
        ((65, 66), (67, 67, 67)),
    )
    (whole,) = drawn(tmp_path / "whole", asked)
    toy = Toy(tmp_path / "parts")
    for settled in range(1, len(whole)):
        toy.submit(str(settled), asked, settled=tuple(whole[:settled]))
        toy.submit(f"p{settled}", asked, settled=tuple(whole[:settled]), mode=Mode.PREFILL_ONLY)
    toy.rest()
    # A prefill node leaves the first token to others where it has the whole prompt cached.
    drawn_first = [settled for settled in range(1, len(whole)) if f"p{settled}" in toy.tokens]
    assert len(drawn_first) >= len(whole) // 2
    for settled in range(1, len(whole)):
        assert toy.tokens[str(settled)] == whole[settled:], settled
    for settled in drawn_first:
        assert toy.tokens[f"p{settled}"] == [whole[settled]], "a prefill node draws the same token"


def test_a_request_that_may_draw_nothing_ends_by_itself_and_harms_nobody(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    allowed = SamplingParameters(seed=1, max_tokens=4, allowed_token_ids=(65, toy.eos[0]))
    toy.submit("all bad", _with(allowed, ((65,), (toy.eos[0],))))
    last = SamplingParameters(
        seed=1, max_tokens=4, min_tokens=2, stop_token_ids=(65,), allowed_token_ids=(65, toy.eos[0])
    )
    toy.engine.take(Submit(RequestKey("only ends"), PROMPT, last))
    toy.submit("good", allowed)
    toy.rest()
    assert (toy.ends["all bad"], toy.ends["only ends"]) == ("nothing_allowed", "nothing_allowed")
    assert toy.ends["good"] in (FinishReason.STOP, FinishReason.LENGTH)


def _with(sampling: SamplingParameters, words: tuple[tuple[int, ...], ...]) -> SamplingParameters:
    return replace(sampling, bad_words=words)
