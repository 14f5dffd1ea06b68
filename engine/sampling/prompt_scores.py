"""Log probabilities of tokens that are given, not drawn: those of a prompt.

A prompt's logits are wanted at every position, and together they would need more memory than anything else of a step (512
positions of 49,152 tokens: 100 MB). So they are made in slices, and what leaves a slice is a handful of numbers a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.step import TokenScores

SLICE_ELEMENTS = 1 << 22
"""Logits of one slice (16 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of P tokens, on the logits' device; see `TokenScores`."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def sound(self) -> bool:
        """False where a row of logits held a NaN or infinity."""
        return not bool(self.logprobs.isnan().any())

    def to_host(self) -> TokenScores:
        parts = (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        return TokenScores(*(part.cpu().numpy() for part in parts))


def score(logits_of: Callable[[int, int], torch.Tensor], token_ids: torch.Tensor, vocabulary: int, best: int) -> Scores:
    """`logits_of(begin, end)`: [end - begin, vocabulary] of some of the P positions; `token_ids` [P]: what follows each."""
    rows = max(1, SLICE_ELEMENTS // vocabulary)
    slices = [
        _score(logits_of(begin, min(begin + rows, len(token_ids))), token_ids[begin : begin + rows], best)
        for begin in range(0, len(token_ids), rows)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*slices, strict=True)))


def _score(
    logits: torch.Tensor, token_ids: torch.Tensor, best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = torch.log_softmax(logits.float(), dim=-1)
    own = raw.gather(1, token_ids[:, None])
    ranks = (raw >= own).sum(dim=-1)
    top_logprobs, top_token_ids = raw.topk(min(best, raw.shape[1]), dim=-1)
    return own[:, 0], ranks, top_token_ids, top_logprobs
