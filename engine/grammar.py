"""Grammars that an answer must follow: which tokens may come next, from llguidance.

A grammar is a text in llguidance's own form (Lark, or its JSON), made and checked by the router. Its state follows from the
answer's tokens alone, so it is rebuilt from the history wherever a sequence goes on.

Must not know: requests, torch, schedulers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import llguidance.numpy
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.grammar_trial import GrammarTrial

MASK_WORD_BITS = 32
MOST_READ = 128
"""Grammars that have been read and not opened yet; what was read before is forgotten, and read again."""


class Grammar:
    """One answer's place in its grammar. When the answer can only be over, the model's end tokens alone are allowed."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.words = words
        """int32 words of a mask; bit i of word w is token 32 * w + i."""
        self._matcher = matcher
        self._followed = 0

    @property
    def lost(self) -> bool:
        """Whether following it has become too much for the library, which then lets an answer only end, wherever it is."""
        broken: bool = self._matcher.is_error()
        return broken

    def follow(self, answer: Sequence[int]) -> None:
        """`answer`: all its tokens so far; those that are new are followed."""
        self._matcher.consume_tokens(list(answer[self._followed :]))
        self._followed = len(answer)

    def fill(self, masks: npt.NDArray[np.int32], row: int) -> None:
        """Which tokens may come next, into `masks` [M, words]."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, masks, row)


class Grammars:
    """The served model's vocabulary, against which grammars are read."""

    def __init__(self, tokenizer_file: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids`: not empty, for they are all that may follow a complete answer."""
        self._new_trial = partial(GrammarTrial, tokenizer_file, vocabulary_size, eos_token_ids)
        self._of_thread = threading.local()
        text = tokenizer_file.read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(text, n_vocab=vocabulary_size, eos_token=list(eos_token_ids))
        self._words = -(-vocabulary_size // MASK_WORD_BITS)
        self._read: deque[tuple[str, LLMatcher]] = deque(maxlen=MOST_READ)
        self._lock = threading.Lock()

    def read(self, grammar: str) -> bool:
        """So that the next `open` is quick; False where it cannot be read in time (`grammar_trial`). On any thread but the
        engine's, and others run meanwhile. Raises RuntimeError where nothing can be tried."""
        trial: GrammarTrial | None = getattr(self._of_thread, "trial", None)
        if trial is None:
            trial = self._of_thread.trial = self._new_trial()
        if not trial.reads(grammar):
            return False
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        with self._lock:
            self._read.append((grammar, matcher))
        return True

    def open(self, grammar: str) -> Grammar | None:
        """A new answer's state; None for what is no grammar, or one that the library finds too large."""
        matcher = self._take(grammar) or LLMatcher(self._tokenizer, grammar, log_level=0)
        return None if matcher.is_error() else Grammar(matcher, self._words)

    def _take(self, grammar: str) -> LLMatcher | None:
        with self._lock:
            for place, (text, matcher) in enumerate(self._read):
                if text == grammar:
                    del self._read[place]
                    return matcher
        return None
