"""A step's numbers from pinned memory to the device, and from there to the buffers that kernels and captured graphs read at
fixed addresses.

Here tokens that the host has not seen feed back, and block tables become FlashInfer's flat page indices. Pinned memory is read
by a kernel: a copy would wait in the copy engine for what else comes from the host, a millisecond behind 32 MiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS_A_PROGRAM = 512
BLOCKS_A_PROGRAM = 512
WORDS_A_PROGRAM = 1024


@triton.jit(do_not_specialize=["count"])
def _fetch_words(pinned, staged, count, WORDS: tl.constexpr):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(staged + word, tl.load(pinned + word, mask=word < count, other=0), mask=word < count)


def fetch_words(pinned: torch.Tensor, staged: torch.Tensor) -> None:
    """All of `pinned` (int32, in pinned host memory) into `staged` (int32, as many), in the order of the current stream."""
    count = len(pinned)
    assert count == len(staged), f"{count} words into {len(staged)}"
    _fetch_words[(triton.cdiv(count, WORDS_A_PROGRAM),)](pinned, staged, count, WORDS=WORDS_A_PROGRAM, num_warps=4)


@triton.jit
def _unpack_tokens(staged, sampled, token_ids, positions, slots, tokens, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    given = tl.load(staged + token, mask=inside, other=0)
    feedback = tl.load(staged + tokens + token, mask=inside, other=-1)
    fed = tl.load(sampled + feedback, mask=inside & (feedback >= 0), other=0).to(tl.int32)
    tl.store(token_ids + token, tl.where(feedback >= 0, fed, given), mask=inside)
    tl.store(positions + token, tl.load(staged + 2 * tokens + token, mask=inside, other=0), mask=inside)
    tl.store(slots + token, tl.load(staged + 3 * tokens + token, mask=inside, other=0), mask=inside)


def unpack_tokens(
    staged: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tokens: int,
) -> None:
    """`staged` int32 [4 * tokens]: given ids, feedback (index into int64 `sampled`, or -1), positions, slots."""
    _unpack_tokens[(triton.cdiv(tokens, TOKENS_A_PROGRAM),)](
        staged, sampled, token_ids, positions, slots, tokens, TOKENS=TOKENS_A_PROGRAM, num_warps=4
    )


@triton.jit
def _unpack_rows(staged, page_start, last_page_lengths, pages, rows, width, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(staged + row)
    end = tl.load(staged + row + 1)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    table = staged + 2 * rows + 1 + row.to(tl.int64) * width
    inside = block < end - start
    tl.store(pages + start + block, tl.load(table + block, mask=inside, other=0), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(page_start + row, start)
        tl.store(page_start + row + 1, end)
        tl.store(last_page_lengths + row, tl.load(staged + rows + 1 + row))


def unpack_rows(
    staged: torch.Tensor,
    page_start: torch.Tensor,
    last_page_lengths: torch.Tensor,
    pages: torch.Tensor,
    rows: int,
    width: int,
) -> None:
    """`staged` int32: page starts [rows + 1], last page lengths [rows], block table [rows, width]."""
    _unpack_rows[(rows, triton.cdiv(width, BLOCKS_A_PROGRAM))](
        staged, page_start, last_page_lengths, pages, rows, width, BLOCKS=BLOCKS_A_PROGRAM, num_warps=4
    )
