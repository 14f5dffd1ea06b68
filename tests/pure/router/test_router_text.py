"""Incremental detokenization and stop strings: the pieces always join to what the whole text says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import AnswerText, AnyDetokenizer, ByteDetokenizer, Detokenizer, StopStrings

SPECIAL = 256


def decode(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer: token i is byte i; 256 is special and writes nothing."""
    return bytes(token_id for token_id in token_ids if token_id != SPECIAL).decode("utf-8", "replace")


def decode_with_leading_space(token_ids: Sequence[int]) -> str:
    """A tokenizer of words, each written with a space before it, except at the start of a text."""
    return " ".join(f"w{token_id}" for token_id in token_ids if token_id != SPECIAL)


def pieces_of(detokenizer: AnyDetokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_text_comes_out_whole_and_no_piece_holds_half_a_character(text: str) -> None:
    pieces = pieces_of(Detokenizer(decode), text.encode())
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@settings(deadline=None)
@given(st.lists(st.integers(0, SPECIAL), max_size=200))
def test_any_tokens_join_to_the_text_of_all_tokens(token_ids: list[int]) -> None:
    assert "".join(pieces_of(Detokenizer(decode), token_ids)) == decode(token_ids)


BYTES = {token_id: bytes([token_id]) for token_id in range(SPECIAL)} | {SPECIAL: b""}


@settings(deadline=None)
@given(st.lists(st.integers(0, SPECIAL), max_size=200))
def test_bytes_one_after_another_give_the_text_of_all_tokens(token_ids: list[int]) -> None:
    pieces = pieces_of(ByteDetokenizer(BYTES), token_ids)
    assert "".join(pieces) == decode(token_ids)
    assert not any(piece.endswith("�") for piece in pieces[:-1]) or "�" in decode(token_ids)


def test_bytes_of_a_character_that_the_prompt_began_complete_it() -> None:
    fox = "🦊".encode()
    assert pieces_of(ByteDetokenizer(BYTES, context=fox[:2]), fox[2:]) == ["", "🦊", ""]


def test_a_character_of_four_bytes_comes_with_its_last_byte() -> None:
    assert pieces_of(Detokenizer(decode), "a🦊b".encode()) == ["a", "", "", "", "🦊", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_broken() -> None:
    assert pieces_of(Detokenizer(decode), b"a\xf0\x9f") == ["a", "", "", "�"]


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    detokenizer = Detokenizer(decode_with_leading_space, context=(1, 2))
    assert pieces_of(detokenizer, (3, 4)) == [" w3", " w4", ""]


def test_a_word_after_a_special_token_keeps_its_space() -> None:
    detokenizer = Detokenizer(decode_with_leading_space, context=(1,))
    assert "".join(pieces_of(detokenizer, (3, SPECIAL, SPECIAL, 4))) == " w3 w4"


def test_endless_broken_bytes_neither_grow_the_window_nor_stop_the_text() -> None:
    detokenizer = Detokenizer(decode)
    shown = sum(len(detokenizer.add(0x80)) for _ in range(1000))
    assert shown >= 990
    assert len(detokenizer._window) <= 200


@settings(deadline=None)
@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_where_text_is_cut_does_not_change_where_it_stops(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    by_pieces, by_characters = StopStrings(stops), StopStrings(stops)
    pieced = "".join(by_pieces.add(text[start:end]) for start, end in itertools.pairwise(bounds))
    single = "".join(by_characters.add(character) for character in text)
    assert by_pieces.found == by_characters.found
    assert pieced + by_pieces.finish() == single + by_characters.finish()
    if by_pieces.found is None:
        assert not any(stop in text for stop in stops)


def test_what_may_become_a_stop_string_is_held_back_and_shown_when_it_does_not() -> None:
    stops = StopStrings(["\n\nUser:"])
    assert [stops.add(piece) for piece in ("Hi", "\n", "\nUs", "ual")] == ["Hi", "", "", "\n\nUsual"]


def test_the_text_before_a_stop_string_that_spans_pieces_is_all_that_is_shown() -> None:
    stops = StopStrings(["END", "STOP"])
    assert [stops.add(piece) for piece in ("one S", "TO", "P two", "three")] == ["one ", "", "", ""]
    assert stops.found == "STOP"
    assert stops.finish() == ""


def test_held_back_text_is_shown_at_the_end() -> None:
    answer = AnswerText(Detokenizer(decode), ["xyz"])
    assert "".join(answer.add(byte) for byte in b"abxy") == "ab"
    assert answer.finish() == "xy"


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    answer = AnswerText(Detokenizer(decode), ["b"], min_tokens=3)
    assert "".join(answer.add(byte) for byte in b"abcab") == "abca"
    assert answer.stop_found == "b"
