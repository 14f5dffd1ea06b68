"""Tickets: a router's signed permission for one attempt to take KV from one prefill node.

Routers sign, prefill nodes check (`kv_transfer.ticket` decides what a genuine ticket is good for). The encoding is our own
and fixed, so that what is signed is exactly what is read: version, kid, numbers, digests, request id, and an HMAC-SHA256
over all of it. Reading foreign bytes yields a `Ticket` or a `TicketRefusal`, and never raises.

Must not know: protobuf, gRPC, transfers in progress.
"""

from __future__ import annotations

import hmac
import struct
from array import array
from dataclasses import astuple, dataclass
from enum import Enum
from hashlib import blake2b

from foundation.fingerprint import Fingerprint
from foundation.ids import AttemptId, Incarnation, RequestId
from foundation.keys import NodeKeys

VERSION = 1
EPOCH_S = 30.0
"""A prefill node's ticket epoch advances after this time on its own clock."""
DIGEST_BYTES = 16
LONGEST_REQUEST_ID_BYTES = 256

_HEAD = struct.Struct("<BHIHQQQ16s16sH")
_MAC_BYTES = 32


class TicketRefusal(Enum):
    """Why a ticket is not honoured; the value is the name that goes into `Refused`, logs and metrics."""

    MALFORMED = "ticket_malformed"
    UNKNOWN_VERSION = "ticket_unknown_version"
    UNKNOWN_KEY = "ticket_unknown_key"
    FORGED = "ticket_forged"
    OTHER_TRANSFER = "ticket_for_another_transfer"
    OTHER_DECODE_INCARNATION = "ticket_for_another_decode_incarnation"
    OTHER_PREFILL_INCARNATION = "ticket_for_another_prefill_incarnation"
    EXPIRED = "ticket_expired"
    NOT_YET = "ticket_of_a_future_epoch"
    OTHER_FINGERPRINT = "ticket_for_another_fingerprint"
    OTHER_TOKENS = "ticket_for_other_tokens"
    USED = "ticket_already_used"
    TOO_MANY = "ticket_memory_full"


@dataclass(frozen=True, slots=True)
class Ticket:
    """`epoch` is P's, as it last told the router; `fingerprint` and `tokens` are `DIGEST_BYTES` long."""

    attempt: AttemptId
    max_tries: int
    decode_incarnation: Incarnation
    prefill_incarnation: Incarnation
    epoch: int
    fingerprint: bytes
    tokens: bytes


def digest_of_tokens(prompt: tuple[int, ...], settled: tuple[int, ...]) -> bytes:
    """blake2b over the token ids as little-endian 64-bit numbers, the prompt's length first."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for numbers in ((len(prompt),), prompt, settled):
        words = array("Q", numbers)  # "q" takes three times as long
        assert words.itemsize == 8
        digest.update(words)
    return digest.digest()


def digest_of_fingerprint(fingerprint: Fingerprint) -> bytes:
    """blake2b over all fields, each with its length, so that no two fingerprints read the same."""
    fields = (str(value).encode() for value in astuple(fingerprint))
    body = b"".join(len(value).to_bytes(4, "little") + value for value in fields)
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


def sign_ticket(ticket: Ticket, keys: NodeKeys) -> bytes:
    """Bytes for `PrefillChoice.ticket`, under P's node key. Raises ValueError when a field does not fit."""
    request = ticket.attempt.request.encode()
    if not 1 <= len(request) <= LONGEST_REQUEST_ID_BYTES:
        raise ValueError(f"request id takes {len(request)} bytes; at most {LONGEST_REQUEST_ID_BYTES} fit a ticket")
    if len(ticket.fingerprint) != DIGEST_BYTES or len(ticket.tokens) != DIGEST_BYTES:
        raise ValueError(f"fingerprint and tokens are digests of {DIGEST_BYTES} bytes")
    key = keys.signing()
    try:
        head = _HEAD.pack(
            VERSION,
            key.kid,
            ticket.attempt.attempt,
            ticket.max_tries,
            ticket.decode_incarnation,
            ticket.prefill_incarnation,
            ticket.epoch,
            ticket.fingerprint,
            ticket.tokens,
            len(request),
        )
    except struct.error as error:
        raise ValueError(f"a number does not fit a ticket: {error}") from None
    return head + request + hmac.digest(key.secret, head + request, "sha256")


def read_ticket(raw: bytes, keys: NodeKeys) -> Ticket | TicketRefusal:
    """A genuine ticket, whatever it permits; or why these bytes are none. Total: never raises."""
    if not _HEAD.size + _MAC_BYTES < len(raw) <= _HEAD.size + LONGEST_REQUEST_ID_BYTES + _MAC_BYTES:
        return TicketRefusal.MALFORMED
    version, kid, attempt, max_tries, decode, prefill, epoch, fingerprint, tokens, length = _HEAD.unpack_from(raw)
    if version != VERSION:
        return TicketRefusal.UNKNOWN_VERSION
    body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    if len(body) != _HEAD.size + length:
        return TicketRefusal.MALFORMED
    key = keys.find(kid)
    if key is None:
        return TicketRefusal.UNKNOWN_KEY
    if not hmac.compare_digest(hmac.digest(key.secret, body, "sha256"), mac):
        return TicketRefusal.FORGED
    try:
        request = RequestId(body[_HEAD.size :].decode())
    except UnicodeDecodeError:
        return TicketRefusal.MALFORMED
    return Ticket(
        AttemptId(request, attempt),
        max_tries,
        Incarnation(decode),
        Incarnation(prefill),
        epoch,
        fingerprint,
        tokens,
    )
