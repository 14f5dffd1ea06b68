"""Masks of the tokens that a grammar allows, applied to the rows that have one.

Must not know: grammars.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.host_numbers import beside
from engine.step import TokenMasks


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Sets `logits` [S, vocabulary] of tokens that are not allowed to -inf, in place."""
    vocabulary = logits.shape[1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    rows, forbidden = beside(logits, masks.rows), beside(logits, bits == 0)
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
