"""Logit bias and the three penalties, applied to the rows that ask for them before anything is drawn.

Semantics are vLLM's: bias is added first; then, of tokens in prompt or answer, a positive logit is divided by the repetition
penalty and a negative one multiplied by it; then the answer's tokens lose frequency * count and presence. Counts are taken anew
from the history at each step, so there is no state to move, to preempt or to rebuild.

Must not know: requests, why a row asks.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.host_numbers import beside
from engine.step import Adjustments


def adjust(logits: torch.Tensor, adjustments: Adjustments, previous_tokens: torch.Tensor | None) -> None:
    """Change `logits` [S, vocabulary] in place. `previous_tokens` [S'] are the samples of the plan launched before."""
    if len(adjustments.bias_rows):
        places = (beside(logits, adjustments.bias_rows), beside(logits, adjustments.bias_tokens))
        logits[places] += beside(logits, adjustments.bias_values).to(logits.dtype)
    if len(adjustments.rows):
        rows = beside(logits, adjustments.rows)
        logits[rows] = _penalized(logits[rows].float(), adjustments, previous_tokens).to(logits.dtype)


def _penalized(logits: torch.Tensor, adjustments: Adjustments, previous_tokens: torch.Tensor | None) -> torch.Tensor:
    """[A, vocabulary] of the rows with penalties."""
    generated = adjustments.generated
    answer_rows = beside(logits, adjustments.history_of[generated])
    answer_tokens = beside(logits, adjustments.history[generated])
    fed = np.flatnonzero(adjustments.feedback >= 0)
    if len(fed):
        assert previous_tokens is not None, "a history ends with a token of a step that never ran"
        sources = beside(logits, adjustments.feedback[fed].astype(np.int64))
        answer_rows = torch.cat((answer_rows, beside(logits, fed)))
        answer_tokens = torch.cat((answer_tokens, previous_tokens[sources]))
    counts = torch.zeros_like(logits)
    counts.index_put_((answer_rows, answer_tokens), torch.ones_like(answer_rows, dtype=logits.dtype), accumulate=True)
    said = counts > 0
    seen = said.clone()
    places = beside(logits, adjustments.history_of), beside(logits, adjustments.history)
    seen.index_put_(places, torch.ones((), dtype=torch.bool, device=logits.device))
    repetition = beside(logits, adjustments.repetition)[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= beside(logits, adjustments.frequency)[:, None] * counts
    logits -= beside(logits, adjustments.presence)[:, None] * said
    return logits
