"""Tokens that are named alone, as in lists of log probabilities, are named as they stand in the middle of a text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.tokenizer import ModelText

PIECES = ["<unk>", "▁Hello", "Hello", "▁", "a", "▁▁", ",", "<0xE2>", "<0x82>", "<0xAC>"]
IDS = {piece: index for index, piece in enumerate(PIECES)}


def metaspace() -> Tokenizer:
    tokenizer = _pieces()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def llama() -> Tokenizer:
    """The decoder of Llama 2's tokenizer.json."""
    tokenizer = _pieces()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _pieces() -> Tokenizer:
    scores = [(piece, -float(index)) for index, piece in enumerate(PIECES)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return tokenizer


@pytest.mark.parametrize("make", [metaspace, llama])
def test_a_piece_keeps_the_space_that_it_begins_with(make: object) -> None:
    assert callable(make)
    text = ModelText(make())
    assert text.decode_all([IDS["▁Hello"]]) == text.decode_all([IDS["Hello"]]) == "Hello", "alone they look the same"
    names = [text.token_text([IDS[piece]]) for piece in ("▁Hello", "Hello", "▁▁", ",")]
    assert names == [" Hello", "Hello", "  ", ","]
    assert bytes(text.token_bytes(IDS["▁Hello"])) == b" Hello"
    assert text.token_text([len(PIECES)]) == "</s>"


def test_the_bytes_of_a_character_that_is_cut_into_bytes_are_its_own() -> None:
    text = ModelText(llama())
    euro = [IDS[piece] for piece in ("<0xE2>", "<0x82>", "<0xAC>")]
    assert bytes(byte for token in euro for byte in text.token_bytes(token)).decode() == "€"
