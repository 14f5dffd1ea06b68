"""The digest of parcels in device slots: NH over 8-byte words, keyed by place, so that the order of summation does not matter and
a gather or scatter can take it from the registers that it stores.

With word w of the payload split into halves (low, high), and a 64-bit key for each place made from the seed by a Weyl sequence
and one round of SplitMix64's finalizer, likewise split:

    sum over w of ((low + key_low) mod 2^32) * ((high + key_high) mod 2^32)   mod 2^64

(NH: Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC", CRYPTO 1999). The sum is then mixed with the payload's length.
It detects accidents; it does not authenticate. This file is the definition, in numpy; `device_copy` holds the kernels.

Must not know: torch, pools, slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KIND = "nh64"
"""Name of this digest in Hello."""

GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def nh_sum(seed: int, payload: npt.NDArray[np.uint8]) -> int:
    """The sum alone. `payload` is a whole number of 8-byte words."""
    words = payload.view("<u8")
    with np.errstate(over="ignore"):
        keys = np.uint64(seed) + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
        keys ^= keys >> np.uint64(27)
        low = (words + keys) & np.uint64(0xFFFFFFFF)
        high = ((words >> np.uint64(32)) + (keys >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
        return int(np.sum(low * high, dtype=np.uint64))


def finish(total: int, payload_bytes: int) -> int:
    """The digest of a payload of this length with this sum."""
    z = (total ^ (payload_bytes * GOLDEN)) & MASK
    z = ((z ^ (z >> 30)) * FIRST_MULTIPLIER) & MASK
    z = ((z ^ (z >> 27)) * SECOND_MULTIPLIER) & MASK
    return z ^ (z >> 31)


def payload_digest(seed: int, payload: npt.NDArray[np.uint8]) -> int:
    return finish(nh_sum(seed, payload), payload.size)
