"""What a pair measures before it carries anybody's KV: its lane, and GB/s at slot size in each direction.

Both sides call `measure_lane` at the same time, D with the arena that it drew for the session, P with scratch memory. First
P sends to D, then D to P. One message goes ahead alone and starts the receiver's clock; the rest follow together, as
parcels do, and the last to land stops it. So neither clocks nor the start have to agree. Tags come from a nonce that belongs
to the test alone.

Must not know: parcels, control messages; who is told the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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

MESSAGES = 8


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
    nonce = SessionNonce(xxhash.xxh3_64_intdigest(session.session.to_bytes(8, "little")) & ((1 << NONCE_BITS) - 1))
    tags = [credit_tag(nonce, CreditNumber(number)) for number in range(2 * MESSAGES)]
    to_decode, to_prefill = tags[:MESSAGES], tags[MESSAGES:]
    try:
        async with asyncio.timeout(deadline_s):
            if receive_first:
                seconds = await _receive_all(session, to_decode, buffers)
                await _send_all(session, to_prefill, buffers)
            else:
                await _send_all(session, to_decode, buffers)
                seconds = await _receive_all(session, to_prefill, buffers)
    except TimeoutError as error:
        raise TransportError("self_test_timeout", f"lane {session.lane.name} took more than {deadline_s} s") from error
    return LaneMeasure(session.lane, (MESSAGES - 1) * buffers[0].size / max(seconds, 1e-9) / 1e9)


async def _receive_all(session: DataSession, tags: Sequence[Tag], buffers: Sequence[Bytes]) -> float:
    """Seconds from the first message landed to the last. As many receives are open as there are buffers."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    landed_s: list[float] = []

    def post(index: int) -> None:
        session.post_receive(tags[index], buffers[index % len(buffers)], partial(landed, index))

    def landed(index: int, outcome: ReceiveOutcome) -> None:
        if finished.done():
            return
        if not isinstance(outcome, Landed):
            finished.set_exception(TransportError("self_test_failed", f"{outcome}"))
            return
        landed_s.append(loop.time())
        if index + len(buffers) < len(tags):
            post(index + len(buffers))
        if len(landed_s) == len(tags):
            finished.set_result(None)

    for index in range(min(len(buffers), len(tags))):
        post(index)
    await finished
    return max(landed_s) - landed_s[0]


async def _send_all(session: DataSession, tags: Sequence[Tag], buffers: Sequence[Bytes]) -> None:
    await _send(session, tags[:1], buffers)
    await _send(session, tags[1:], buffers)


async def _send(session: DataSession, tags: Sequence[Tag], buffers: Sequence[Bytes]) -> None:
    loop = asyncio.get_running_loop()
    outcomes: list[asyncio.Future[SendOutcome]] = []
    for index, tag in enumerate(tags):
        sent: asyncio.Future[SendOutcome] = loop.create_future()
        outcomes.append(sent)
        session.send(tag, buffers[index % len(buffers)], partial(_resolve, sent))
    for outcome in await asyncio.gather(*outcomes):
        if not isinstance(outcome, Sent):
            raise TransportError("self_test_failed", f"{outcome}")


def _resolve(sent: asyncio.Future[SendOutcome], outcome: SendOutcome) -> None:
    if not sent.done():
        sent.set_result(outcome)
