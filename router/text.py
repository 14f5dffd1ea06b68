"""Tokens become text, piece by piece: incremental detokenization, and stop strings that may span tokens.

Both are rebuilt from the token log alone, so a stream that goes on at another node continues in the middle of a character.

Must not know: requests, nodes, HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens skipped; bytes that are no UTF-8 become U+FFFD."""

_REPLACEMENT = "�"
_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most 4 bytes, hence at most 4 byte tokens: what is still broken after them stays broken."""
_LONGEST_WINDOW = 64
"""Tokens decoded anew at each step when a model emits nothing but broken bytes; beyond it they are given up as they are."""


class Detokenizer:
    """Yields the text that each token completes; the pieces join to the text of all tokens.

    Decodes a window that begins at the group of tokens emitted before, since some tokenizers write a token differently at the
    start of a text (the algorithm of text-generation-inference and vLLM: prefix offset and read offset). Text that ends in
    U+FFFD is held back, for the next token may complete the character.
    """

    __slots__ = ("_decode", "_given", "_prefix_tokens", "_window")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: the last few tokens of the prompt, which decide how the first token of the answer is written."""
        self._decode = decode
        self._window = list(context)
        self._prefix_tokens = len(self._window)
        self._given = len(decode(self._window)) if self._window else 0
        """Characters of the window's text that have been given out (or belong to the context)."""

    def add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held_tokens = len(self._window) - self._prefix_tokens
        if text.endswith(_REPLACEMENT):
            if held_tokens <= _CHARACTER_TOKENS:
                return ""
            if held_tokens < _LONGEST_WINDOW:
                # Only the last broken character can still be completed.
                return self._give(text[:-1])
        elif len(text) <= self._given:
            # A special token, which writes nothing: it must not become the context of the next one. Endless ones are cut.
            if held_tokens >= _LONGEST_WINDOW:
                del self._window[self._prefix_tokens :]
            return ""
        piece = self._give(text)
        self._window = self._window[self._prefix_tokens :]
        self._prefix_tokens = len(self._window)
        self._given = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back: broken bytes at the end of an answer."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


class ByteDetokenizer:
    """The same for tokenizers whose text is the bytes of all tokens (byte-level BPE): nothing is decoded twice."""

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Mapping[int, bytes], context: Sequence[int] = ()) -> None:
        """`bytes_of`: what each token writes."""
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(b"".join(bytes_of[token_id] for token_id in context))

    def add(self, token_id: int) -> str:
        return self._decode(self._bytes_of[token_id])

    def finish(self) -> str:
        return self._decode(b"", True)


AnyDetokenizer = Detokenizer | ByteDetokenizer


class StopStrings:
    """Passes text on up to the first stop string, holding back only what may be the beginning of one.

    The stop string that is complete first wins; of two that end together the longer. So the outcome does not depend on how the
    text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops`: none of them empty. `include`: the stop string itself is passed on too."""
        assert all(stops), "an empty stop string would end every answer"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that may be shown now. After `found` is set, nothing more."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found) if self._include else start]
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        ends = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in ends if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_beginning(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """The text of one answer: detokenization, then stop strings. Stop strings count only after `min_tokens` tokens."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "_tokens")

    def __init__(
        self,
        detokenizer: AnyDetokenizer,
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    @property
    def stop_found(self) -> str | None:
        return self._stops.found

    def add(self, token_id: int) -> str:
        self._tokens += 1
        piece = self._detokenizer.add(token_id)
        if not piece:
            return ""
        if self._tokens <= self._min_tokens:
            return piece
        return self._stops.add(piece)

    def finish(self) -> str:
        if self._stops.found is not None:
            return ""
        rest = self._stops.add(self._detokenizer.finish())
        return rest + self._stops.finish()
