"""The randomness of a draw: a pure function of (seed, choice index, absolute position, token id).

Gumbel-max (Gumbel, 1954; Maddison, Tarlow and Minka, 2014): argmax over tokens of logit + Gumbel noise is an exact draw from the
softmax, filtered or not. Since each token's noise depends on nothing but those four numbers, a stream that goes on elsewhere, in
another batch or another row, draws the same tokens.

Algorithm: a row's 64-bit key absorbs stream, seed, choice index and position in turn, key = mix((key ^ word) + G); a token's
bits are mix(key + (token id + 1) * G), that is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) started at the key and advanced token id + 1 times. `mix` is its finalizer (Stafford's variant 13),
G its golden-ratio increment. The upper 52 bits, plus one half, over 2^52 are a uniform number u in (0, 1); the noise is
-log(-log(u)) in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
UNIFORM_BITS = 52

DRAW_STREAM = 0
"""Stream of ordinary draws; others are free for further decisions at the same position (speculative acceptance)."""

UInt64 = npt.NDArray[np.uint64]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_words(z: UInt64) -> UInt64:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z ^ (z >> np.uint64(SHIFTS[2]))


def draw_keys(
    seed: UInt64, choice_index: npt.NDArray[np.int32], position: npt.NDArray[np.int64], stream: int = DRAW_STREAM
) -> UInt64:
    """One key a row, shape [S]; negative words count as their 64-bit two's complement."""
    key = np.full(len(seed), stream, np.uint64)
    for word in (seed, choice_index.astype(np.int64).view(np.uint64), position.view(np.uint64)):
        key = _mix_words((key ^ word) + np.uint64(GOLDEN))
    return key


def _mix_tensor(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bits, in place; products wrap, and shifts are made logical by masking."""
    shifted = torch.empty_like(z)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            z.mul_(_signed(multiplier))
    return z


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float64 noise for int64 keys (the bits of `draw_keys`) and token ids, which are broadcast against each other."""
    bits = _mix_tensor(keys + (token_ids + 1) * _signed(GOLDEN))
    bits = bits.bitwise_right_shift_(64 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()
