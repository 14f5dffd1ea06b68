"""Tokens from logits on the device, by the rules and in the order of `engine.sampling.sampler`, without an answer from the host.

Only what a step asks for is computed, and only that reaches the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.graphs.buffers import SampleInputs
from engine.kernels.draw import draw, filter_thresholds
from engine.kernels.log_softmax import log_softmax_rows
from engine.sampling.adjust import adjust
from engine.sampling.mask import apply_masks
from engine.step import SamplingRows


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows that want any, [n] and [n, most wanted]; what `engine.step.StepResult` spreads over all rows."""

    chosen: torch.Tensor
    top_token_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None


def sample_on_device(
    logits: torch.Tensor,
    rows: SamplingRows,
    inputs: SampleInputs,
    previous_tokens: torch.Tensor,
    tokens: torch.Tensor,
    best_logits: torch.Tensor,
    *,
    invariant: bool = False,
) -> Logprobs | None:
    """Draw into `tokens` int64 [S]; `best_logits` float32 [S] is not finite where a row of `logits` [S, vocabulary] is unsound.

    `logits` may be overwritten; `inputs` are `rows` on the device. `previous_tokens` are the samples of the plan launched
    before, and may share the memory of `tokens`. `invariant`: log probabilities do not depend on the rows beside them, and of
    equal ones the lower token comes first; what is drawn never depends on other rows.
    """
    raw = None
    if len(inputs.logprob_rows):
        if invariant:
            raw = log_softmax_rows(logits, inputs.logprob_rows)
        else:
            raw = torch.log_softmax(logits[inputs.logprob_rows].float(), dim=-1)
    if len(inputs.banned_rows):
        never = torch.full(
            (), float("-inf"), dtype=logits.dtype, device=logits.device
        )  # a number would be copied, and waited for
        logits.index_put_((inputs.banned_rows, inputs.banned_tokens), never)
    if rows.masks is not None:
        apply_masks(logits, rows.masks)
    if rows.adjustments is not None:
        adjust(logits, rows.adjustments, previous_tokens)
    drawn = rows.temperature > 0
    filtered = drawn & ((rows.min_p > 0) | (rows.top_k > 0) | (rows.top_p < 1))
    thresholds = None
    if filtered.any():
        thresholds = filter_thresholds(logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
    draw(logits, inputs.temperature, inputs.keys, thresholds, tokens, best_logits, drawn=bool(drawn.any()))
    if raw is None:
        return None
    chosen = raw.gather(1, tokens[inputs.logprob_rows][:, None])[:, 0]
    best = int(np.max(rows.logprobs))
    if best == 0:
        return Logprobs(chosen, None, None)
    if invariant:
        values, ids = (both[:, :best] for both in raw.sort(dim=-1, descending=True, stable=True))
    else:
        values, ids = raw.topk(min(best, raw.shape[1]), dim=-1)
    return Logprobs(chosen, ids, values)
