"""Tokens from logits, for a whole batch, touching for each feature only the rows that asked for it.

Order: logprobs of the raw distribution; tokens that are banned or masked; bias and penalties; then, for rows with a temperature,
temperature, min-p, top-k, top-p (each over what the one before left, as vLLM orders them) and a Gumbel-max draw. Filters are
thresholds on the logit: tokens that tie with the last one kept are kept as well, so that no order of equal logits can matter. A
batch of greedy rows costs one argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.adjust import adjust
from engine.sampling.mask import apply_masks
from engine.sampling.noise import draw_keys, gumbel_noise
from engine.step import SamplingRows

SORTED_PREFIXES = (512, 8192)
"""Top-p looks at this many best tokens first, then at more; only rows whose nucleus is larger pay for a whole sort."""

SLAB_ELEMENTS = 1 << 16
"""On a CPU, draws go through the logits in slabs of about this many, so that their many passes stay in the cache."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens [S] on the logits' device, and for the host what `StepResult` wants, or None."""

    token_ids: torch.Tensor
    best_logits: torch.Tensor
    """[S] the greatest logit of each row; not finite where the row held a NaN or infinity."""
    logprobs: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def sample(logits: torch.Tensor, rows: SamplingRows, previous_tokens: torch.Tensor | None = None) -> Sampled:
    """Draw a token for each row of `logits` [S, vocabulary], which may be overwritten.

    `previous_tokens` are the samples of the plan launched before; needed when an adjustment's `feedback` names any.
    """
    wanted = np.flatnonzero(rows.logprobs >= 0)
    raw_logprobs = torch.log_softmax(logits[_index(wanted)].float(), dim=-1) if len(wanted) else None
    if rows.banned:
        banned = torch.tensor(rows.banned, device=logits.device)
        logits[banned[:, 0], banned[:, 1]] = float("-inf")
    if rows.masks is not None:
        apply_masks(logits, rows.masks)
    if rows.adjustments is not None:
        adjust(logits, rows.adjustments, previous_tokens)
    best_logits, tokens = logits.max(dim=-1)
    drawn = np.flatnonzero(rows.temperature > 0)
    if len(drawn):
        slab_rows = max(1, SLAB_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(drawn)
        for first in range(0, len(drawn), slab_rows):
            part = drawn[first : first + slab_rows]
            index = _index(part)
            tokens[index] = _draw(logits[index], rows, part)
    if raw_logprobs is None:
        return Sampled(tokens, best_logits)
    return _with_logprobs(tokens, best_logits, raw_logprobs, wanted, int(rows.logprobs.max()))


def _index(rows: npt.NDArray[np.intp]) -> torch.Tensor:
    return torch.from_numpy(rows)


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)[:, None]


def _with_logprobs(
    tokens: torch.Tensor, best_logits: torch.Tensor, raw: torch.Tensor, wanted: npt.NDArray[np.intp], best: int
) -> Sampled:
    """Rows that want none hold NaN (and token 0)."""
    index = _index(wanted)
    logprobs = torch.full((len(tokens),), float("nan"), device=raw.device)
    logprobs[index] = raw.gather(1, tokens[index][:, None])[:, 0]
    if best == 0:
        return Sampled(tokens, best_logits, logprobs)
    values, ids = raw.topk(min(best, raw.shape[1]), dim=-1)
    top_logprobs = torch.full((len(tokens), values.shape[1]), float("nan"), device=raw.device)
    top_token_ids = torch.zeros(top_logprobs.shape, dtype=torch.int64, device=raw.device)
    top_logprobs[index], top_token_ids[index] = values, ids
    return Sampled(tokens, best_logits, logprobs, top_token_ids, top_logprobs)


def _draw(logits: torch.Tensor, rows: SamplingRows, drawn: npt.NDArray[np.intp]) -> torch.Tensor:
    """Gumbel-max tokens [D] for the rows `drawn` (indices into `rows`) whose logits are [D, vocabulary]."""
    device = logits.device
    scaled = logits.double() / _column(rows.temperature[drawn].astype(np.float64), device)
    keys = draw_keys(rows.seed[drawn], rows.choice_index[drawn], rows.position[drawn]).view(np.int64)
    min_p, top_k, top_p = rows.min_p[drawn], rows.top_k[drawn], rows.top_p[drawn]
    filtered = (min_p > 0) | (top_k > 0) | (top_p < 1)
    if filtered.any():
        part = np.flatnonzero(filtered)
        index = _index(part)
        scaled[index] = keep_likely(scaled[index], min_p[part], top_k[part], top_p[part])
    if filtered.all():
        row, token = (scaled != float("-inf")).nonzero(as_tuple=True)
        scaled[row, token] += gumbel_noise(torch.from_numpy(keys).to(device)[row], token)
    else:
        scaled += gumbel_noise(_column(keys, device), torch.arange(logits.shape[1], device=device))
    return scaled.argmax(dim=-1)


def keep_likely(
    scaled: torch.Tensor,
    min_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
) -> torch.Tensor:
    """`scaled` [D, vocabulary] with -inf for tokens that min-p, top-k (0: off) or top-p (1: off) removes."""
    device, vocabulary = scaled.device, scaled.shape[1]
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):
            distance = _column(np.log(min_p.astype(np.float64)), device)
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=-1, keepdim=True) + distance, float("-inf"))
    limited = np.where((top_k > 0) & (top_k < vocabulary), top_k, 0)
    if limited.any():
        best = scaled.topk(int(limited.max()), dim=-1).values
        last_kept = best.gather(1, _column(np.maximum(limited, 1).astype(np.int64) - 1, device))
        last_kept = last_kept.masked_fill(_column(limited == 0, device), float("-inf"))
        scaled = scaled.masked_fill(scaled < last_kept, float("-inf"))
    nucleus = np.flatnonzero(top_p < 1)
    if len(nucleus):
        index = _index(nucleus)
        part = scaled[index]
        threshold = _nucleus_threshold(part, _column(top_p[nucleus].astype(np.float64), device))
        scaled[index] = part.masked_fill(part < threshold, float("-inf"))
    return scaled


def _nucleus_threshold(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[D, 1] least value of the smallest set of best tokens whose probabilities reach top_p; the best token always."""
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    threshold = torch.empty_like(top_p)
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for count in (*(n for n in SORTED_PREFIXES if n < scaled.shape[1]), scaled.shape[1]):
        best = scaled[open_rows].topk(count, dim=-1).values
        probabilities = (best - log_total[open_rows]).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < top_p[open_rows]).sum(dim=-1, keepdim=True).clamp_(min=1)
        threshold[open_rows] = best.gather(1, kept - 1)
        open_rows = open_rows[kept[:, 0] == count]
        if len(open_rows) == 0:
            break
    return threshold
