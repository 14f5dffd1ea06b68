"""Log probabilities of one prompt's tokens, as they come from decode nodes: run by run, each position kept once.

An attempt that is lost in the middle of the prompt is followed by one that begins anew, maybe in other runs; what is known of a
position already stays.

Must not know: requests, nodes, texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from decant_proto.v1 import types_pb2

RUN_TOKENS = 512


class TokenScore(NamedTuple):
    """Of one token of the prompt, behind all before it."""

    logprob: float
    rank: int
    best: Sequence[tuple[int, float]]
    """Token ids and log probabilities of the likeliest, the best first."""


class PromptScores:
    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._scores: list[TokenScore] = []

    @property
    def complete(self) -> bool:
        """Whether every position after the first is known."""
        return len(self._scores) >= self._prompt_tokens - 1

    def __iter__(self) -> Iterator[TokenScore]:
        """From the second token of the prompt on."""
        return iter(self._scores)

    def runs(self) -> Iterator[types_pb2.PromptLogprobs]:
        """The same as messages, none of which grows with the prompt."""
        for first in range(0, len(self._scores), RUN_TOKENS):
            run = self._scores[first : first + RUN_TOKENS]
            yield types_pb2.PromptLogprobs(
                position=first + 1,
                logprobs=[score.logprob for score in run],
                ranks=[score.rank for score in run],
                top_token_ids=[token_id for score in run for token_id, _ in score.best],
                top_logprobs=[logprob for score in run for _, logprob in score.best],
            )

    def take(self, run: types_pb2.PromptLogprobs) -> None:
        """A run that leaves positions out, or goes beyond the prompt, changes nothing: then `complete` stays False."""
        known, count = len(self._scores) + 1 - run.position, len(run.logprobs)
        follows = run.position > 0 and 0 <= known < count and run.position + count <= self._prompt_tokens
        if not follows or count != len(run.ranks):
            return
        best, rest = divmod(len(run.top_token_ids), count)
        if rest or len(run.top_logprobs) != len(run.top_token_ids):
            return
        tops = list(zip(run.top_token_ids, run.top_logprobs, strict=True))
        self._scores += [
            TokenScore(run.logprobs[at], run.ranks[at], tops[at * best : (at + 1) * best]) for at in range(known, count)
        ]
