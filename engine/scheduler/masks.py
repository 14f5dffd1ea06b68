"""Which tokens the rows of a step may draw: what a grammar or a list allows, less what is banned.

A row whose choice depends on the tokens before it is planned only when every one of them is known (`seats.constrained`).

Must not know: torch, pools, lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.grammar import MASK_WORD_BITS
from engine.request import Request
from engine.scheduler.seats import Seats
from engine.step import Int32, Int64, TokenMasks


def token_masks(seats: Seats, drawing: Int64) -> TokenMasks | None:
    """For the seats `drawing`, which draw in this order."""
    rows = np.flatnonzero(seats.masked[drawing])
    if not len(rows):
        return None
    requests = [seats.request(int(drawing[row])) for row in rows]
    words = np.zeros((len(rows), max(map(_mask_words, requests))), np.int32)
    for index, request in enumerate(requests):
        if request.grammar is not None:
            request.grammar.follow(request.history[request.rules.prompt_length :])
            request.grammar.fill(words, index)
        else:
            allowed = _allowed_words(request)
            words[index, : len(allowed)] = allowed
    return TokenMasks(rows, words)


def _mask_words(request: Request) -> int:
    """Tokens beyond a mask are not allowed."""
    if request.grammar is not None:
        return request.grammar.words
    return len(_allowed_words(request))


def _allowed_words(request: Request) -> Int32:
    """Made once for each request: a list may be as long as the vocabulary."""
    if request.allowed_words is None:
        request.allowed_words = _list_mask(request.sampling.allowed_token_ids)
    return request.allowed_words


def _list_mask(token_ids: Sequence[int]) -> Int32:
    bits = np.zeros((max(token_ids) // MASK_WORD_BITS + 1) * MASK_WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def banned_tokens(seats: Seats, drawing: Int64) -> tuple[tuple[int, int], ...]:
    """(row, token id): stop tokens before min_tokens, and what would complete a bad word."""
    short = np.flatnonzero(seats.length[drawing] < seats.min_length[drawing])
    stops = [
        (row, token_id)
        for row in short.tolist()
        for token_id in sorted(seats.request(int(drawing[row])).rules.stop_token_ids)
    ]
    worded = np.flatnonzero(seats.worded[drawing])
    bad = [(row, token_id) for row in worded.tolist() for token_id in completions(seats.request(int(drawing[row])))]
    return (*stops, *bad)


def completions(request: Request) -> list[int]:
    """The tokens that would complete one of the request's bad words now. Only the answer counts, as in vLLM."""
    words = request.sampling.bad_words
    before = max(map(len, words)) - 1
    start = max(request.rules.prompt_length, len(request.history) - before)
    tail = tuple(request.history[start:])
    return sorted({word[-1] for word in words if tail[len(tail) - len(word) + 1 :] == word[:-1]})
