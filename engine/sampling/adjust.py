"""Logit bias and the three penalties, applied to the rows that ask for them before anything is drawn.

Semantics are vLLM's: bias is added first; then, of tokens in prompt or answer, a positive logit is divided by the repetition
penalty and a negative one multiplied by it; then the answer's tokens lose frequency * count and presence. Counts are taken anew
from the history at each step, so there is no state to move, to preempt or to rebuild.

Must not know: requests, why a row asks.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.step import Adjustments


def adjust(logits: torch.Tensor, adjustments: Adjustments, previous_tokens: torch.Tensor | None) -> None:
    """Change `logits` [S, vocabulary] in place. `previous_tokens` [S'] are the samples of the plan launched before."""
    device = logits.device
    if len(adjustments.bias_rows):
        places = (_tensor(adjustments.bias_rows, device), _tensor(adjustments.bias_tokens, device))
        logits[places] += _tensor(adjustments.bias_values, device).to(logits.dtype)
    if len(adjustments.rows):
        rows = _tensor(adjustments.rows, device)
        logits[rows] = _penalized(logits[rows].float(), adjustments, previous_tokens).to(logits.dtype)


def _penalized(logits: torch.Tensor, adjustments: Adjustments, previous_tokens: torch.Tensor | None) -> torch.Tensor:
    """[A, vocabulary] of the rows with penalties."""
    device = logits.device
    generated = adjustments.generated
    answer_rows = _tensor(adjustments.history_of[generated], device)
    answer_tokens = _tensor(adjustments.history[generated], device)
    fed = np.flatnonzero(adjustments.feedback >= 0)
    if len(fed):
        assert previous_tokens is not None, "a history ends with a token of a step that never ran"
        sources = _tensor(adjustments.feedback[fed].astype(np.int64), device)
        answer_rows = torch.cat((answer_rows, _tensor(fed, device)))
        answer_tokens = torch.cat((answer_tokens, previous_tokens[sources]))
    counts = torch.zeros_like(logits)
    counts.index_put_((answer_rows, answer_tokens), torch.ones_like(answer_rows, dtype=logits.dtype), accumulate=True)
    said = counts > 0
    seen = said.clone()
    places = _tensor(adjustments.history_of, device), _tensor(adjustments.history, device)
    seen.index_put_(places, torch.ones((), dtype=torch.bool, device=device))
    repetition = _tensor(adjustments.repetition, device)[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= _tensor(adjustments.frequency, device)[:, None] * counts
    logits -= _tensor(adjustments.presence, device)[:, None] * said
    return logits


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a GPU, on its way: nothing waits for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
