"""The data plane over UCX: tagged messages between workers, one endpoint for each session.

Both sides exchange what it takes to reach them over the data port (`rendezvous`, `contact`), greet each other over the new
endpoint, so that a session is only handed out once bytes have travelled both ways, and read the lane that UCX chose from the
endpoint itself.

Receives are posted on the session's endpoint, which ends them with it. On lanes declared `close_fences_receives` that end is
the fence: UCX has dropped what a late message would refer to.

Must not know: parcels, digests, the protocol's states, gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np

from kv_transfer.transport.base import (
    NUMBER_BITS,
    Bytes,
    CloseOutcome,
    DataSession,
    Fenced,
    Landed,
    Lane,
    LostCallback,
    NotFenced,
    ReceiveCancelled,
    ReceiveFailed,
    ReceiveOutcome,
    SendFailed,
    SendOutcome,
    Sent,
    Tag,
    TransportError,
    mint_fence,
)
from kv_transfer.transport.contact import Contact, read_contact
from kv_transfer.transport.cuda_memory import CudaDevice
from kv_transfer.transport.lanes import Memory, lane_of_endpoint
from kv_transfer.transport.rendezvous import (
    HANDSHAKE_LIMIT_S,
    Call,
    Lifeline,
    bind_data_port,
    place_call,
    read_call,
    refuse,
    welcome,
)
from kv_transfer.transport.ucx_worker import OK, UcxEndpoint, UcxWorker, status_name

HANDSHAKES_AT_ONCE = 64
CLOSE_LIMIT_S = 5.0
READ_BY_RECEIVER_BYTES = 1 << 20
"""Shorter messages may be sent along with their announcement."""
_NONCE_MASK = ((1 << 64) - 1) >> NUMBER_BITS << NUMBER_BITS

Outcome = TypeVar("Outcome", ReceiveOutcome, SendOutcome)


@dataclass(slots=True)
class _Operation(Generic[Outcome]):
    """`number`: the worker's."""

    number: int
    done: Callable[[Outcome], None]
    withdrawn: bool = False


class UcxSession:
    """See `base.DataSession`."""

    def __init__(
        self,
        session: int,
        endpoint: UcxEndpoint,
        lifeline: Lifeline,
        lost: LostCallback,
        transport: UcxTransport,
    ) -> None:
        self.session = session
        self.lane = Lane("unknown", receiver_reads=False, close_fences_receives=False)
        self._endpoint = endpoint
        self._lifeline = lifeline
        self._lost: LostCallback | None = lost
        self._transport = transport
        self._nonces: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._receives: dict[Tag, _Operation[ReceiveOutcome]] = {}
        self._sends: dict[Tag, _Operation[SendOutcome]] = {}
        self._late: set[Tag] = set()
        """Receives that failed on a lane whose endings prove nothing: their bytes may still land."""
        self._destroyed = False
        self._quiet = asyncio.Event()
        self._fence: asyncio.Future[Fenced] = self._loop.create_future()
        self._closing: asyncio.Task[CloseOutcome] | None = None
        self._watch = self._loop.create_task(self._watch_lifeline())
        endpoint.on_failure(partial(self._lose, "endpoint_failed"))

    @property
    def over(self) -> bool:
        """Closed, and UCX refers to none of its buffers. Until then the session must be kept."""
        return self._closing is not None and self._closing.done() and not self._receives and not self._sends

    @property
    def fence(self) -> asyncio.Future[Fenced]:
        return self._fence

    def post_receive(self, tag: Tag, buffer: Bytes, done: Callable[[ReceiveOutcome], None]) -> None:
        assert self._closing is None, f"session {self.session:#x} is closed"
        assert tag not in self._receives, f"tag {tag:#x} is posted already"
        self._nonces.add(tag >> NUMBER_BITS)
        self._receives[tag] = _Operation(self._endpoint.receive(tag, buffer, partial(self._received, tag)), done)

    def cancel_unused(self, tag: Tag) -> None:
        operation = self._receives.get(tag)
        if operation is not None and self._closing is None:  # closing cancels it, too
            operation.withdrawn = True
            self._endpoint.cancel(operation.number)

    def send(self, tag: Tag, buffer: Bytes, done: Callable[[SendOutcome], None]) -> None:
        assert self._closing is None, f"session {self.session:#x} is closed"
        assert tag not in self._sends, f"tag {tag:#x} is being sent already"
        self._sends[tag] = _Operation(self._endpoint.send(tag, buffer, partial(self._was_sent, tag)), done)

    async def close(self) -> CloseOutcome:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        return await asyncio.shield(self._closing)

    async def greet(self, send_tag: int, receive_tag: int) -> None:
        """Returns when a message has travelled each way over this endpoint, and the lane is known."""
        answered, sent = self._loop.create_future(), self._loop.create_future()
        greeting = self._transport.greeting
        half = greeting.size // 2
        self.post_receive(Tag(receive_tag), greeting[:half], partial(_resolve, answered))
        self.send(Tag(send_tag), greeting[half:], partial(_resolve, sent))
        for outcome in await asyncio.gather(answered, sent):
            if not isinstance(outcome, Landed | Sent):
                raise TransportError("unreachable", f"the greeting failed: {outcome}")
        self.lane = lane_of_endpoint(await self._endpoint.describe(), self._transport.memory)

    async def _watch_lifeline(self) -> None:
        self._lose(await self._lifeline.until_lost())

    def _lose(self, reason: str) -> None:
        lost, self._lost = self._lost, None
        if lost is not None and self._closing is None:
            lost(reason)

    def _received(self, tag: Tag, status: int) -> None:
        operation = self._receives.pop(tag)
        outcome = _receive_outcome(tag, status, operation.withdrawn)
        if isinstance(outcome, ReceiveFailed) and outcome.reason != "message_truncated":
            self._lose("endpoint_failed")
            if not self.lane.fences:
                self._late.add(tag)
        self._settle()
        operation.done(outcome)

    def _was_sent(self, tag: Tag, status: int) -> None:
        operation = self._sends.pop(tag)
        if status != OK:
            self._lose("endpoint_failed")
        self._settle()
        operation.done(Sent(tag) if status == OK else SendFailed(tag, status_name(status)))

    def _settle(self) -> None:
        if not self._destroyed or self._receives or self._sends:  # UCX may still read what a send has given it
            return
        self._quiet.set()
        if not self._late and not self._fence.done():
            self._fence.set_result(mint_fence(self.session))

    async def _close(self) -> CloseOutcome:
        self._watch.cancel()
        await self._endpoint.destroy()
        self._destroyed = True
        self._lifeline.close()
        await self._transport.drop_stray_messages(self._nonces)
        self._settle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), CLOSE_LIMIT_S)
        if self._fence.done():
            return self._fence.result()
        return NotFenced(self.session, frozenset(self._late.union(self._receives)))


class UcxTransport:
    """See `base.Transport`. Made on the asyncio thread; the UCX environment must have been applied before.

    With a `device` all messages go from and into its memory, else from and into the host's.
    """

    def __init__(self, device: CudaDevice | None = None) -> None:
        """Raises TransportError (`ucx_unavailable`, `out_of_memory`), SetupError."""
        self.strangers_refused = 0
        self.stray_messages = 0
        self._device = device
        self.memory: Memory = "host" if device is None else "cuda"
        self.greeting = _greeting(device)
        """What all sessions greet with: half of it is overwritten, the other sent."""
        self.worker = UcxWorker(device)
        self._mapping = ThreadPoolExecutor(1, "peer-memory")
        self._sessions: set[UcxSession] = set()
        self._meetings: dict[asyncio.Timeout, asyncio.Future[None]] = {}
        """With callers, and those that are dialled: when each is given up, which is at once when this is closed, and its end."""
        self._closed = False
        self._expected: dict[int, tuple[asyncio.Future[DataSession], LostCallback]] = {}
        self._server: asyncio.Server | None = None
        self._handshakes = 0

    async def listen(self, host: str, port: int) -> str:
        assert self._server is None, "a transport listens once"
        sock = bind_data_port(host, port)
        self._server = await asyncio.start_server(self._answer, sock=sock)
        return f"{host}:{sock.getsockname()[1]}"

    def expect(self, session: int, lost: LostCallback) -> asyncio.Future[DataSession]:
        assert session not in self._expected, f"session {session:#x} is expected already"
        arrived: asyncio.Future[DataSession] = asyncio.get_running_loop().create_future()
        self._expected[session] = arrived, lost
        arrived.add_done_callback(lambda _: self._expected.pop(session, None))
        return arrived

    async def dial(self, address: str, session: int, lost: LostCallback, deadline_s: float) -> DataSession:
        call = Call(session, secrets.randbits(63) << 1, self._contact())
        try:
            async with self._meeting(deadline_s):
                contact, lifeline = await place_call(address, call)
                return await self._open(call, contact, lifeline, lost)
        except TimeoutError as error:
            raise TransportError("dial_timeout", f"{address} did not greet within {deadline_s} s") from error

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for arrived, _ in list(self._expected.values()):
            arrived.cancel()
        for limit in self._meetings:
            if not limit.expired():
                limit.reschedule(0)
        await asyncio.gather(*self._meetings.values())
        await asyncio.gather(*(session.close() for session in self._sessions))
        await self.worker.close()
        self._mapping.shutdown(wait=False)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller on the data port."""
        if self._handshakes >= HANDSHAKES_AT_ONCE:
            self.strangers_refused += 1
            return refuse(writer)
        self._handshakes += 1
        try:
            async with self._meeting(HANDSHAKE_LIMIT_S):
                await self._admit(await read_call(reader), reader, writer)
        except (TransportError, TimeoutError):
            self.strangers_refused += 1
            writer.close()
        finally:
            self._handshakes -= 1
        return None

    @contextlib.asynccontextmanager
    async def _meeting(self, limit_s: float) -> AsyncIterator[None]:
        """Until a session stands. Raises TimeoutError, TransportError (`closed`)."""
        over = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(0 if self._closed else limit_s) as limit:
                self._meetings[limit] = over
                yield
        except TimeoutError:
            if self._closed:
                raise TransportError("closed", "this side has ended") from None
            raise
        finally:
            del self._meetings[limit]
            over.set_result(None)

    async def _admit(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived, lost = self._expected.pop(call.session, (None, None))
        if arrived is None or lost is None or arrived.done():
            self.strangers_refused += 1
            return refuse(writer)
        say_welcome = partial(welcome, writer, self._contact())
        try:
            session = await self._open(call, call.contact, Lifeline(reader, writer), lost, say_welcome)
        except BaseException as error:
            if not arrived.done():
                arrived.set_exception(TransportError("unreachable", f"the greeting failed: {error!r}"))
            raise
        if arrived.done():  # withdrawn meanwhile
            await session.close()
        else:
            arrived.set_result(session)
        return None

    async def _open(
        self,
        call: Call,
        peer_contact: bytes,
        lifeline: Lifeline,
        lost: LostCallback,
        say_welcome: Callable[[], None] | None = None,
    ) -> UcxSession:
        """`say_welcome`: P's, who says it when its endpoint stands: so UCX seldom connects from both ends at once."""
        try:
            contact = read_contact(peer_contact)
            endpoint = await self.worker.endpoint(contact.worker_address)
        except BaseException:
            lifeline.close()
            raise
        session = UcxSession(call.session, endpoint, lifeline, lost, self)
        self._sessions = {known for known in self._sessions if not known.over} | {session}
        tags = (call.greeting_tag, call.greeting_tag | 1)
        if say_welcome is not None:
            say_welcome()
            tags = tags[::-1]
        try:
            await self._map(session, contact.memory_handles)
            await session.greet(*tags)
        except BaseException:
            await session.close()
            raise
        return session

    def _contact(self) -> bytes:
        handles = () if self._device is None else self._device.handles()
        return Contact(self.worker.address, handles).to_bytes()

    async def _map(self, session: UcxSession, handles: Sequence[bytes]) -> None:
        """Keep a peer's memory mapped until its session is fenced: one thread does both, in this order."""
        if self._device is not None:
            mapped = self._mapping.submit(self._device.map, handles)
            session.fence.add_done_callback(lambda _: self._mapping.submit(lambda: mapped.result().close()))
            await asyncio.wrap_future(mapped)

    async def drop_stray_messages(self, nonces: set[int]) -> None:
        """Of a session that is over."""
        for nonce in nonces:
            self.stray_messages += await self.worker.drop_unexpected(nonce << NUMBER_BITS, _NONCE_MASK)


def _greeting(device: CudaDevice | None) -> Bytes:
    """On a GPU long enough that the receiver reads it: UCX looks whether it can map memory of a GPU that it meets for the first
    time, and never unmaps what it looked with. That must be nothing that a session maps and unmaps, the slots least of all: UCX
    would read them at their old place when the same two processes pair again."""
    if device is None:
        return np.zeros(2, np.uint8)
    return cast(Bytes, device.allocate(2 * READ_BY_RECEIVER_BYTES, mapped_by_peers=False))


def _receive_outcome(tag: Tag, status: int, withdrawn: bool) -> ReceiveOutcome:
    if status == OK:
        return Landed(tag)
    reason = status_name(status)
    return ReceiveCancelled(tag) if withdrawn and reason == "canceled" else ReceiveFailed(tag, reason)


def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
