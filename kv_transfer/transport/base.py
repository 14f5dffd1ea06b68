"""What a driver may ask of the data plane, and what it is told in return.

One `Transport` a node process, one `DataSession` for each control session. Everything here is called on the node's asyncio
thread, returns at once unless it is a coroutine, and completes through callbacks on that same thread, never from inside the
call that started it. A buffer belongs to the transport from the call on until its completion, or until the session's `Fenced`.

A tag names one credit of one session and is never used twice, so a message can only meet the receive that was posted for it.

Must not know: parcels, digests, the protocol's states, gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from foundation.ids import CreditNumber, SessionNonce

Bytes = npt.NDArray[np.uint8]
"""One contiguous run of memory. On a GPU a `cuda_memory.DeviceBytes` stands in, with the same size, length and slices: only
who knows where a pool lies looks at content, and it finds an array where it expects one."""

Tag = NewType("Tag", int)
"""64 bits: session nonce (40) | credit number (24)."""

NONCE_BITS = 40
NUMBER_BITS = 24
CREDIT_NUMBER_LIMIT = 1 << NUMBER_BITS
"""A session ends before its credits reach this number."""


def credit_tag(nonce: SessionNonce, number: CreditNumber) -> Tag:
    assert 0 <= nonce < 1 << NONCE_BITS, f"session nonce {nonce} has more than {NONCE_BITS} bits"
    assert 0 <= number < CREDIT_NUMBER_LIMIT, f"credit number {number} does not fit {NUMBER_BITS} bits"
    return Tag(nonce << NUMBER_BITS | number)


class TransportError(Exception):
    """An expected failure of the data plane. `reason` is a name for logs and metrics, the message a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Lane:
    """How bytes travel on one session, and what its contract tests have shown of it.

    `receiver_reads`: a matched receive completes by itself, whole, whatever becomes of the peer: its completion is its fence.
    `close_fences_receives`: once this side's endpoint is destroyed no byte lands any more.
    """

    name: str
    receiver_reads: bool
    close_fences_receives: bool

    @property
    def fences(self) -> bool:
        return self.receiver_reads or self.close_fences_receives


@dataclass(frozen=True, slots=True)
class Landed:
    """The message is in the buffer, and nothing will write there for this tag again. Its length is not known: the digest
    must cover it."""

    tag: Tag


@dataclass(frozen=True, slots=True)
class ReceiveCancelled:
    """Ended by `cancel_unused`: nothing was written."""

    tag: Tag


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """Ended without a message. No fence: bytes may land until the session is fenced, except after `message_truncated`."""

    tag: Tag
    reason: str


ReceiveOutcome = Landed | ReceiveCancelled | ReceiveFailed


@dataclass(frozen=True, slots=True)
class Sent:
    """This side's buffer may be reused. It says nothing about the receiver's memory."""

    tag: Tag


@dataclass(frozen=True, slots=True)
class SendFailed:
    """This side's buffer may be reused; the receiver may hold all, some or none of it."""

    tag: Tag
    reason: str


SendOutcome = Sent | SendFailed

_MINT = object()


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proof that no byte will be written into any buffer that was posted on this session. Only transports make it."""

    session: int
    mint: object = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.mint is _MINT, "only a transport can prove that a session is fenced"


def mint_fence(session: int) -> Fenced:
    """For the transports beside this file, and nobody else."""
    return Fenced(session, _MINT)


@dataclass(frozen=True, slots=True)
class NotFenced:
    """The session is closed, yet bytes may still land for these tags, or be read by a send that has not ended: memory of this
    session is kept until `DataSession.fence` brings the proof."""

    session: int
    open_tags: frozenset[Tag]


CloseOutcome = Fenced | NotFenced


class DataSession(Protocol):
    """One endpoint between two incarnations. `session` is the number D drew in Hello."""

    @property
    def session(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def fence(self) -> asyncio.Future[Fenced]:
        """Done once the endpoint is destroyed, every operation has ended, and no receive has ended in a way after which bytes may
        still land. Where the lane's own endings prove nothing, such a receive keeps it open for ever."""

    def post_receive(self, tag: Tag, buffer: Bytes, done: Callable[[ReceiveOutcome], None]) -> None:
        """Take the message with this tag into `buffer`, whose size is the longest that is accepted (a longer one ends as
        `message_truncated`)."""

    def cancel_unused(self, tag: Tag) -> None:
        """Withdraw a receive that is known never to be used; `done` gets `ReceiveCancelled`, or `Landed` after all.

        On a receive that might be used this is an error of the caller: bytes may land after the cancellation.
        """

    def send(self, tag: Tag, buffer: Bytes, done: Callable[[SendOutcome], None]) -> None:
        """Send the whole of `buffer`. It may wait for its receive as long as the session lives."""

    async def close(self) -> CloseOutcome:
        """Destroy the endpoint. Every open operation completes (as failed, unless it succeeded) before this returns, unless
        that takes longer than the lane allows: then, as on lanes that prove nothing, the outcome is `NotFenced`, and `fence`
        may follow. A second call returns the same outcome. Bounded by the lane, never by the peer."""


LostCallback = Callable[[str], None]
"""Called once, with a reason, when the peer's end of a session is gone. The session still has to be closed."""


class Transport(Protocol):
    """The data plane of one node process."""

    @property
    def strangers_refused(self) -> int:
        """Connections that named no expected session, since the start."""

    @property
    def stray_messages(self) -> int:
        """Messages for a session that nobody had posted for and that were dropped when it closed, since the start."""

    async def listen(self, host: str, port: int) -> str:
        """Accept sessions at host:port (0: any free port); the address that was taken. Raises TransportError
        (`address_in_use`, `bad_address`) naming the setting."""

    def expect(self, session: int, lost: LostCallback) -> asyncio.Future[DataSession]:
        """P: the peer will dial with this session number. The future completes when it has; cancelling it withdraws the
        permission. Each number is accepted once."""

    async def dial(self, address: str, session: int, lost: LostCallback, deadline_s: float) -> DataSession:
        """D: connect to P's data address and say which session this is. Raises TransportError (`bad_address`, `unreachable`,
        `not_expected`, `dial_timeout`, `garbage`; `closed` when this transport is closed meanwhile)."""

    async def close(self) -> None:
        """Close every session and the listener."""
