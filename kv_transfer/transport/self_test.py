"""What a pair measures before it carries anybody's KV: its lane, and GB/s in each direction, at slot size where the lane allows.

Both sides call `measure_lane` at the same time, D with the arena that it drew for the session, P with scratch memory. P leads. It
first sends a few messages that D sends back, each longer than the one before while that goes quickly, and so learns how long a
message may be for the test to take about a second each way: a link of 10 Mbit/s is slow, not broken. Then P sends to D, then D
to P: one message goes ahead alone and starts the receiver's clock; the rest follow together, as parcels do, and the last to
land stops it. So neither clocks nor the start have to agree. What P is going to do it announces in small messages ahead. Tags
come from a nonce that belongs to the test alone.

Must not know: parcels, control messages; who is told the result.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np
import xxhash

from foundation.ids import CreditNumber, SessionNonce
from kv_transfer.transport.base import (
    NONCE_BITS,
    Bytes,
    DataSession,
    Landed,
    Lane,
    ReceiveOutcome,
    SendOutcome,
    Sent,
    Tag,
    TransportError,
    credit_tag,
)

Outcome = TypeVar("Outcome")

MESSAGES = 8
ONE_WAY_S = 1.0
"""How long the messages of one direction may take, by what was learnt before."""
FIRST_RALLY_BYTES, RALLY_GROWTH = 32 * 1024, 8
RALLIES = 2
"""Of each length; the faster one counts."""
LONGEST_RALLY_S = 0.5
"""What is expected to take longer is not tried."""
_ANNOUNCEMENT = struct.Struct("<IB")
"""Bytes of each message that follows; whether it is the first of the measured ones."""


@dataclass(frozen=True, slots=True)
class LaneMeasure:
    """`gigabytes_per_second` of what this side received (10^9 bytes)."""

    lane: Lane
    gigabytes_per_second: float


async def measure_lane(
    session: DataSession,
    buffers: Sequence[Bytes],
    *,
    receive_first: bool,
    deadline_s: float,
    allow_unfenced: bool = False,
) -> LaneMeasure:
    """D passes receive_first=True, P False. `buffers`: at least two, of equal size; their contents are lost.

    Raises TransportError: `lane_cannot_fence`, `self_test_timeout` (the session must then be closed: messages may still be
    open), `self_test_failed`.
    """
    if not session.lane.fences and not allow_unfenced:
        raise TransportError(
            "lane_cannot_fence",
            f"lane {session.lane.name}: late bytes cannot be ruled out after a failure; choose other lanes (UCX_TLS)",
        )
    test = _SelfTest(session, buffers, decode=receive_first)
    try:
        async with asyncio.timeout(deadline_s):
            if receive_first:
                size = await test.follow()
                seconds = await test.receive_measured(size)
                await test.send_measured(size)
            else:
                size = await test.lead()
                await test.send_measured(size)
                seconds = await test.receive_measured(size)
    except TimeoutError as error:
        raise TransportError("self_test_timeout", f"lane {session.lane.name} took more than {deadline_s} s") from error
    return LaneMeasure(session.lane, (MESSAGES - 1) * size / max(seconds, 1e-9) / 1e9)


class _SelfTest:
    """One side's. Tags are used in the same order on both: even numbers travel to D, odd ones to P."""

    def __init__(self, session: DataSession, buffers: Sequence[Bytes], *, decode: bool) -> None:
        self._session = session
        self._buffers = buffers
        self._loop = asyncio.get_running_loop()
        digest = xxhash.xxh3_64_intdigest(session.session.to_bytes(8, "little"))
        nonce = SessionNonce(digest & ((1 << NONCE_BITS) - 1))
        to_decode, to_prefill = _tags(nonce, 0), _tags(nonce, 1)
        self._incoming, self._outgoing = (to_decode, to_prefill) if decode else (to_prefill, to_decode)

    async def lead(self) -> int:
        """P: how long the measured messages are, of which D then knows as well."""
        slot = self._buffers[0].size
        size = slot
        if slot > FIRST_RALLY_BYTES:
            tried, seconds = FIRST_RALLY_BYTES, await self._rally_s(FIRST_RALLY_BYTES)
            while tried < slot and seconds * RALLY_GROWTH < LONGEST_RALLY_S:
                tried = min(tried * RALLY_GROWTH, slot)
                seconds = await self._rally_s(tried)
            bytes_per_second = 2 * tried / max(seconds, 1e-9)
            size = max(FIRST_RALLY_BYTES // RALLY_GROWTH, min(slot, int(bytes_per_second * ONE_WAY_S / MESSAGES)))
        await self._announce(size, measured=True)
        return size

    async def follow(self) -> int:
        """D: sends back what P sends until P announces the measured messages; their length."""
        announcement = np.zeros(_ANNOUNCEMENT.size, np.uint8)
        while True:
            await self._receive(next(self._incoming), announcement)
            size, measured = _ANNOUNCEMENT.unpack(announcement.tobytes())
            if not 0 < size <= self._buffers[0].size:
                raise TransportError("self_test_failed", f"the peer announces messages of {size} bytes")
            if measured:
                return int(size)
            await self._receive(next(self._incoming), self._buffers[0][:size])
            await self._send([self._buffers[0][:size]])

    async def receive_measured(self, size: int) -> float:
        """Seconds from the first message landed to the last. As many receives are open as there are buffers."""
        await self._receive(next(self._incoming), self._buffers[0][:size])
        begun_s = time.perf_counter()  # uvloop's own clock ticks in milliseconds
        rest = iter([next(self._incoming) for _ in range(MESSAGES - 1)])

        async def receive_in_turn(buffer: Bytes) -> None:
            for tag in rest:
                await self._receive(tag, buffer)

        await asyncio.gather(*(receive_in_turn(buffer[:size]) for buffer in self._buffers))
        return time.perf_counter() - begun_s

    async def send_measured(self, size: int) -> None:
        await self._send([self._buffers[0][:size]])
        await self._send([self._buffers[index % len(self._buffers)][:size] for index in range(1, MESSAGES)])

    async def _rally_s(self, size: int) -> float:
        """Seconds for a message to D and back."""
        took_s = []
        for _ in range(RALLIES):
            begun_s = time.perf_counter()
            await self._announce(size, measured=False)
            await self._send([self._buffers[0][:size]])
            await self._receive(next(self._incoming), self._buffers[0][:size])
            took_s.append(time.perf_counter() - begun_s)
        return min(took_s)

    async def _announce(self, size: int, *, measured: bool) -> None:
        await self._send([np.frombuffer(_ANNOUNCEMENT.pack(size, measured), np.uint8).copy()])

    async def _receive(self, tag: Tag, buffer: Bytes) -> None:
        landed: asyncio.Future[ReceiveOutcome] = self._loop.create_future()
        self._session.post_receive(tag, buffer, partial(_resolve, landed))
        outcome = await landed
        if not isinstance(outcome, Landed):
            raise TransportError("self_test_failed", f"{outcome}")

    async def _send(self, messages: Sequence[Bytes]) -> None:
        outcomes: list[asyncio.Future[SendOutcome]] = []
        for message in messages:
            sent: asyncio.Future[SendOutcome] = self._loop.create_future()
            outcomes.append(sent)
            self._session.send(next(self._outgoing), message, partial(_resolve, sent))
        for outcome in await asyncio.gather(*outcomes):
            if not isinstance(outcome, Sent):
                raise TransportError("self_test_failed", f"{outcome}")


def _tags(nonce: SessionNonce, first: int) -> Iterator[Tag]:
    return (credit_tag(nonce, CreditNumber(number)) for number in count(first, 2))


def _resolve(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
