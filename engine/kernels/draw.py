"""Tokens from logits on the device, by the rules of `engine.sampling`: filters as thresholds, then the argmax of
logit / temperature plus counter-based Gumbel noise, in float64. Nothing depends on a row's place in the batch, so permuting
rows changes no draw.

A filter keeps a token if its logit reaches the row's threshold. Thresholds are found by bisecting the ordered bit patterns
of the logits (16 steps for bfloat16, 32 for float32), which needs no sort and no answer from the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.sampling.noise import GOLDEN, MULTIPLIERS, SHIFTS, UNIFORM_BITS

TILE = 2048
SPLITS_AT_MOST = 64
THRESHOLD_TILE = 4096

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_MULTIPLIER = tl.constexpr(MULTIPLIERS[0])
_SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[1])
_FIRST_SHIFT = tl.constexpr(SHIFTS[0])
_SECOND_SHIFT = tl.constexpr(SHIFTS[1])
_THIRD_SHIFT = tl.constexpr(SHIFTS[2])
_DROPPED_BITS = tl.constexpr(64 - UNIFORM_BITS)
_UNIFORM_SCALE = tl.constexpr(2.0**-UNIFORM_BITS)
_LOWEST = tl.constexpr(float("-inf"))
_BEYOND_VOCABULARY = tl.constexpr(2**31 - 1)


@triton.jit
def _noise(key, token):
    """float64 Gumbel noise; `engine.sampling.noise` describes the algorithm."""
    bits = key + (token.to(tl.uint64) + 1) * _GOLDEN
    bits = (bits ^ (bits >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    bits = (bits ^ (bits >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    bits = bits ^ (bits >> _THIRD_SHIFT)
    uniform = ((bits >> _DROPPED_BITS).to(tl.float64) + 0.5) * _UNIFORM_SCALE
    return -tl.log(-tl.log(uniform))


@triton.jit
def _better(score, token, other_score, other_token):
    """The greater score; of equal ones the lower token."""
    other_wins = (other_score > score) | ((other_score == score) & (other_token < token))
    return tl.where(other_wins, other_score, score), tl.where(other_wins, other_token, token)


@triton.jit
def _greater(a, b):
    return tl.where(b > a, b, a)


@triton.jit
def _draw_split(
    logits,
    temperatures,
    keys,
    thresholds,
    split_scores,
    split_tokens,
    split_best,
    row_stride,
    vocabulary,
    tokens_a_split,
    TILE: tl.constexpr,
    FILTERED: tl.constexpr,
    DRAWN: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    threshold = _LOWEST
    if FILTERED:
        threshold = tl.load(thresholds + row)
    base = logits + row.to(tl.int64) * row_stride
    best_score = tl.full((TILE,), _LOWEST, tl.float64 if DRAWN else tl.float32)
    best_token = tl.full((TILE,), _BEYOND_VOCABULARY, tl.int32)
    best_logit = tl.full((TILE,), _LOWEST, tl.float32)
    unsound = tl.zeros((TILE,), tl.int32)
    first = split * tokens_a_split
    for offset in range(0, tokens_a_split, TILE):
        token = first + offset + tl.arange(0, TILE)
        inside = (token < vocabulary) & (offset + tl.arange(0, TILE) < tokens_a_split)
        logit = tl.load(base + token, mask=inside, other=_LOWEST).to(tl.float32)
        unsound |= ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        best_logit = _greater(best_logit, logit)
        score = logit
        if DRAWN:
            score = logit.to(tl.float64)
            if temperature > 0:
                score = score / temperature + _noise(key, token)
                score = tl.where(logit == _LOWEST, _LOWEST, score)
                if FILTERED:
                    score = tl.where(logit >= threshold, score, _LOWEST)
        token = tl.where(inside & (score > _LOWEST), token, _BEYOND_VOCABULARY)
        best_score, best_token = _better(best_score, best_token, score, token)
    score, token = tl.reduce((best_score, best_token), 0, _better)
    top = tl.reduce(best_logit, 0, _greater)
    top = tl.where(tl.max(unsound, axis=0) > 0, float("nan"), top)
    tl.store(split_scores + row * splits + split, score.to(tl.float64))
    tl.store(split_tokens + row * splits + split, token)
    tl.store(split_best + row * splits + split, top)


@triton.jit
def _draw_join(split_scores, split_tokens, split_best, tokens, best_logits, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    place = row * splits + split
    score = tl.load(split_scores + place, mask=inside, other=_LOWEST)
    token = tl.load(split_tokens + place, mask=inside, other=_BEYOND_VOCABULARY)
    best = tl.load(split_best + place, mask=inside, other=_LOWEST)
    score, token = tl.reduce((score, token), 0, _better)
    unsound = tl.max((best != best).to(tl.int32), axis=0) > 0
    top = tl.where(unsound, float("nan"), tl.reduce(best, 0, _greater))
    tl.store(tokens + row, tl.where(token == _BEYOND_VOCABULARY, 0, token).to(tl.int64))
    tl.store(best_logits + row, top)


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    thresholds: torch.Tensor | None,
    tokens: torch.Tensor,
    best_logits: torch.Tensor,
    *,
    drawn: bool = True,
) -> None:
    """A token for each row of `logits` [S, vocabulary] into int64 `tokens` [S], and the row's greatest logit, NaN where the row
    holds a NaN or infinity, into float32 `best_logits` [S].

    `temperatures` float32 [S], 0 is greedy; `keys` int64 [S], the bits of `draw_keys`; `thresholds` float32 [S] or None.
    `drawn` False promises that every row is greedy, which needs no float64.
    """
    rows, vocabulary = logits.shape
    splits = min(SPLITS_AT_MOST, triton.cdiv(vocabulary, TILE))
    tokens_a_split = triton.cdiv(vocabulary, splits)
    split_scores = torch.empty(rows, splits, dtype=torch.float64, device=logits.device)
    split_tokens = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    split_best = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    _draw_split[(rows, splits)](
        logits,
        temperatures,
        keys,
        thresholds,
        split_scores,
        split_tokens,
        split_best,
        logits.stride(0),
        vocabulary,
        tokens_a_split,
        TILE=TILE,
        FILTERED=thresholds is not None,
        DRAWN=drawn,
        num_warps=8,
    )
    _draw_join[(rows,)](
        split_scores,
        split_tokens,
        split_best,
        tokens,
        best_logits,
        splits,
        SPLITS=triton.next_power_of_2(splits),
        num_warps=2,
    )


@triton.jit
def _order(pattern, BITS: tl.constexpr):
    """Bit pattern of a float (sign-extended to int64) to an integer in the same order, and back: its own inverse."""
    flipped: tl.constexpr = (1 << (BITS - 1)) - 1
    return tl.where(pattern < 0, pattern ^ flipped, pattern)


@triton.jit
def _pattern(value, WIDE: tl.constexpr):
    if WIDE:
        return value.to(tl.int32, bitcast=True).to(tl.int64)
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64)


@triton.jit
def _value(pattern, WIDE: tl.constexpr):
    if WIDE:
        return pattern.to(tl.int32).to(tl.float32, bitcast=True)
    return pattern.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _tail(base, vocabulary, limit, strict, floor, best, inverse_temperature, COUNT: tl.constexpr, TILE: tl.constexpr):
    """How many tokens, or how much unnormalized probability, lie from `limit` up (`strict`: above it), and from `floor` up."""
    total = tl.zeros((TILE,), tl.float64)
    for offset in range(0, vocabulary, TILE):
        token = offset + tl.arange(0, TILE)
        logit = tl.load(base + token, mask=token < vocabulary, other=_LOWEST).to(tl.float32)
        kept = (logit >= floor) & ((logit > limit) | ((logit == limit) & (strict == 0))) & (logit > _LOWEST)
        if COUNT:
            total += tl.where(kept, 1.0, 0.0).to(tl.float64)
        else:
            total += tl.where(kept, tl.exp((logit - best) * inverse_temperature), 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _threshold(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    row_stride,
    vocabulary,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    floor = tl.full((), _LOWEST, tl.float32)
    limited = (top_k > 0) & (top_k < vocabulary)
    if (temperature > 0) & (limited | (top_p < 1) | (min_p > 0)):
        greatest = tl.full((TILE,), _LOWEST, tl.float32)
        for offset in range(0, vocabulary, TILE):
            token = offset + tl.arange(0, TILE)
            logit = tl.load(base + token, mask=token < vocabulary, other=_LOWEST).to(tl.float32)
            greatest = _greater(greatest, logit)
        best = tl.reduce(greatest, 0, _greater)
        inverse_temperature = 1.0 / temperature
        BITS: tl.constexpr = 32 if WIDE else 16
        if min_p > 0:
            distance = tl.log(min_p.to(tl.float64)) * temperature.to(tl.float64)
            least = best.to(tl.float64) + distance
            # The least float32 that is not below `least`: rounding down would keep a token too many.
            floor = least.to(tl.float32)
            up = _value(_order(_order(_pattern(floor, True), 32) + 1, 32), True)
            floor = tl.where(floor.to(tl.float64) < least, up, floor)
        if limited:  # noqa: SIM102 (a condition here is evaluated whole)
            # The greatest limit that at least top_k tokens reach, unless fewer are left.
            if _tail(base, vocabulary, floor, 0, floor, best, inverse_temperature, True, TILE) > top_k:
                low = _order(_pattern(_greater(floor, -3.3e38), WIDE), BITS) - 1
                high = _order(_pattern(best, WIDE), BITS) + 1
                while high - low > 1:
                    middle = low + (high - low) // 2
                    limit = _value(_order(middle, BITS), WIDE)
                    if _tail(base, vocabulary, limit, 0, floor, best, inverse_temperature, True, TILE) >= top_k:
                        low = middle
                    else:
                        high = middle
                floor = _greater(floor, _value(_order(low, BITS), WIDE))
        if top_p < 1:
            # The least limit above which less than top_p of the probability lies.
            wanted = _tail(base, vocabulary, floor, 0, floor, best, inverse_temperature, False, TILE) * top_p
            low = _order(_pattern(_greater(floor, -3.3e38), WIDE), BITS) - 1
            high = _order(_pattern(best, WIDE), BITS)
            while high - low > 1:
                middle = low + (high - low) // 2
                limit = _value(_order(middle, BITS), WIDE)
                if _tail(base, vocabulary, limit, 1, floor, best, inverse_temperature, False, TILE) < wanted:
                    high = middle
                else:
                    low = middle
            floor = _greater(floor, _value(_order(high, BITS), WIDE))
    tl.store(thresholds + row, floor)


def filter_thresholds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """float32 [S]: the least logit that min-p, top-k (0: off) and top-p (1: off) keep, each over what the one before left; -inf
    for rows that filter nothing. Ties with the last one kept are kept. Probabilities are summed from float32 terms, so a
    nucleus whose mass lies within about 1e-6 of top_p may be a token longer or shorter than in float64.
    """
    thresholds = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _threshold[(len(logits),)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        thresholds,
        logits.stride(0),
        logits.shape[1],
        TILE=THRESHOLD_TILE,
        WIDE=logits.dtype != torch.bfloat16,
        num_warps=8,
    )
    return thresholds
