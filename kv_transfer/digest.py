"""What proves a parcel: a digest that only the right bytes, for the right transfer, in the right slot can have.

Each side derives the seed from *its own* plan: transfer, incarnations, session, credit, parcel, token ids, fingerprint and
length. A parcel of another attempt, another position or another prompt has another seed, so it fails like a flipped bit
does. The digest travels behind the payload, and again in the manifest. It detects accidents and confusion; it does not
authenticate.

xxh3_64 (Yann Collet, https://xxhash.com): seeded, about twice as fast as a copy.

Must not know: slots, pools, transports.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, SessionNonce, TransferId
from kv_transfer.plan.parcels import ParcelName

KIND = "xxh3_64"
"""Name of this digest in Hello."""

TRAILER_BYTES = 8
"""The digest behind a parcel's payload, little-endian."""


def message_bytes(payload_bytes: int) -> int:
    """Length of the message that carries a payload."""
    return payload_bytes + TRAILER_BYTES


class DigestSeeds:
    """Seeds of one transfer's parcels, equal on both sides if and only if they mean the same transfer.

    `history`: prompt, then settled tokens: whose KV travels.
    """

    def __init__(
        self,
        transfer: TransferId,
        prefill: Incarnation,
        decode: Incarnation,
        nonce: SessionNonce,
        fingerprint: Fingerprint,
        history: TokenHistory,
    ) -> None:
        self._identity = _identity(transfer, prefill, decode, nonce, fingerprint)
        self._history = history

    def seed(self, number: CreditNumber, parcel: ParcelName, payload_bytes: int) -> int:
        """64-bit seed for the parcel that this credit carries."""
        tokens = self._history.hash_until(parcel.end_position)
        return xxhash.xxh3_64_intdigest(struct.pack("<9Q", tokens, number, payload_bytes, *parcel), self._identity)


class TokenHistory:
    """Hash of a token history up to any position. Asked for in rising order, each token is hashed once. The first answer, also
    one for 0, is the one that takes long."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._hasher = xxhash.xxh3_64()
        self._end = 0

    @cached_property
    def _words(self) -> npt.NDArray[np.uint32]:
        return np.asarray(array("I", self.token_ids), dtype="<u4")  # numpy alone takes three times as long

    def hash_until(self, end: int) -> int:
        assert 0 <= end <= len(self._words), f"position {end} lies beyond a history of {len(self._words)} tokens"
        if end < self._end:
            self._hasher, self._end = xxhash.xxh3_64(), 0
        self._hasher.update(self._words[self._end : end].tobytes())
        self._end = end
        return self._hasher.intdigest()


def _identity(
    transfer: TransferId, prefill: Incarnation, decode: Incarnation, nonce: SessionNonce, fingerprint: Fingerprint
) -> int:
    text = f"{transfer.request}\0{_agreed(fingerprint)}".encode()
    numbers = struct.pack("<QQQQQ", transfer.attempt, transfer.try_number, prefill, decode, nonce)
    return xxhash.xxh3_64_intdigest(numbers + text)


@lru_cache(maxsize=4)
def _agreed(fingerprint: Fingerprint) -> str:
    """The same for all transfers of a node."""
    return "\0".join(f"{field.name}={getattr(fingerprint, field.name)!r}" for field in fields(fingerprint))


def payload_digest(seed: int, payload: npt.NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed)  # type: ignore[arg-type]


def manifest_digest(digests: Sequence[int]) -> int:
    """Digest of all parcels' digests, in plan order."""
    return xxhash.xxh3_64_intdigest(np.asarray(digests, dtype="<u8").tobytes())
