"""Log probabilities of some rows of logits, each summed in one order: PyTorch's softmax begins where a row's address is aligned,
which for most vocabularies differs from row to row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _greater(a, b):
    return tl.where(b > a, b, a)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _log_softmax(logits, rows, out, vocabulary, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + tl.load(rows + row).to(tl.int64) * vocabulary
    greatest = tl.full((TILE,), _LOWEST, tl.float32)
    for offset in range(0, vocabulary, TILE):
        token = offset + tl.arange(0, TILE)
        greatest = _greater(greatest, tl.load(base + token, mask=token < vocabulary, other=_LOWEST).to(tl.float32))
    best = tl.reduce(greatest, 0, _greater)
    sums = tl.zeros((TILE,), tl.float32)
    for offset in range(0, vocabulary, TILE):
        token = offset + tl.arange(0, TILE)
        sums += tl.exp(tl.load(base + token, mask=token < vocabulary, other=_LOWEST).to(tl.float32) - best)
    log_sum = tl.log(tl.sum(sums, axis=0))
    for offset in range(0, vocabulary, TILE):
        token = offset + tl.arange(0, TILE)
        logit = tl.load(base + token, mask=token < vocabulary, other=_LOWEST).to(tl.float32)
        tl.store(out + row * vocabulary + token, logit - best - log_sum, mask=token < vocabulary)


def log_softmax_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """float32 [n, vocabulary] of the rows `rows` int32 [n] of contiguous `logits` [S, vocabulary]."""
    vocabulary = logits.shape[1]
    out = torch.empty(len(rows), vocabulary, dtype=torch.float32, device=logits.device)
    _log_softmax[(len(rows),)](logits, rows, out, vocabulary, TILE=TILE, enable_fp_fusion=False, num_warps=8)
    return out
