"""The network of a simulated cluster: links between machines, and gRPC streams over them.

A link is one direction between two machines: it has a latency, may be slow, and may be cut. What is sent over a cut link
waits, as TCP would have it, and goes on when the link is healed. A stream is FIFO in each direction; when it breaks, what was
under way is lost, and both ends learn of it.

`SimulatedChannel` and `SimulatedServer` stand in for grpc.aio's, as far as routers, nodes and drivers use them; messages pass
as serialized bytes. Where grpc.aio raises, they raise the same.

Must not know: what is said.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
from cluster_clock import PROCESS, Process, VirtualLoop

FASTEST_S, SLOWEST_S = 0.0002, 0.003


class Link:
    """From one machine to another. `slow_s` is added to each message's time, and to each fragment's on the data plane."""

    def __init__(self, loop: VirtualLoop, source: str, target: str, rng: random.Random) -> None:
        self.source, self.target = source, target
        self.cut = False
        self.slow_s = 0.0
        self.data_free_s = 0.0
        self._loop = loop
        self._rng = rng
        self._waiting: list[Callable[[], object]] = []

    def carry(self, arrive: Callable[[], object], not_before_s: float = 0.0) -> float:
        """Call `arrive` at the other end, not before that time; when that will be, unless the link is cut meanwhile."""
        at_s = max(not_before_s, self._loop.now_s + self._rng.uniform(FASTEST_S, SLOWEST_S) + self.slow_s)
        self._loop.call_later(at_s - self._loop.now_s, self._arrive, arrive, context=NOBODY)
        return at_s

    def _arrive(self, arrive: Callable[[], object]) -> None:
        if self.cut:
            self._waiting.append(arrive)
        else:
            arrive()

    def heal(self) -> None:
        self.cut = False
        waiting, self._waiting = self._waiting, []
        at_s = 0.0
        for arrive in waiting:
            at_s = self.carry(arrive, at_s)


NOBODY = Process("nobody").context
NOBODY.run(PROCESS.set, None)


class Wires:
    """All links and streams. `machine` is a node's name; a restarted node is the same machine."""

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.healed: Callable[[], object] = lambda: None
        """Called after a link was healed: what waits for it elsewhere goes on."""
        self._seed = seed
        self._links: dict[tuple[str, str], Link] = {}
        self._servers: dict[str, SimulatedServer] = {}
        self._streams: list[Stream] = []

    def link(self, source: str, target: str) -> Link:
        link = self._links.get((source, target))
        if link is None:
            rng = random.Random(f"{self._seed}/{source}>{target}")
            link = self._links[source, target] = Link(self.loop, source, target, rng)
        return link

    def listen(self, address: str, server: SimulatedServer) -> None:
        self._servers[address] = server

    def server_at(self, address: str) -> SimulatedServer | None:
        server = self._servers.get(address)
        return server if server is not None and server.process.alive else None

    def opened(self, stream: Stream) -> None:
        self._streams = [known for known in self._streams if not known.over]
        self._streams.append(stream)

    def process_died(self, process: Process) -> None:
        """The kernel closes what the process had open: the other ends hear of it."""
        for stream in self._streams:
            if not stream.over and process in (stream.client, stream.server and stream.server.process):
                stream.end_died(process)

    def break_streams(self, one: str, other: str) -> int:
        """Break every stream between two machines; how many there were."""
        found = [stream for stream in self._streams if not stream.over and stream.machines() == {one, other}]
        for stream in found:
            stream.sever()
        return len(found)


class Stream:
    """One bidirectional call. The client's half is a grpc.aio call object; the server's half is a `ServerContext`."""

    def __init__(self, wires: Wires, client: Process, address: str, method: str, codecs: tuple[Any, Any]) -> None:
        self.client = client
        self.server: SimulatedServer | None = None
        self.over = False
        self._wires = wires
        self._method = method
        self._serialize, self._deserialize = codecs
        self._machine = address.partition(":")[0]
        self._up = wires.link(client.name, self._machine)
        self._down = wires.link(self._machine, client.name)
        self._up_s = self._down_s = 0.0
        self._severed = False
        self._inbox = _Inbox(wires.loop)
        self._metadata: asyncio.Future[tuple[tuple[str, str], ...]] = wires.loop.create_future()
        self._status: grpc.StatusCode | None = None
        self._context: ServerContext | None = None
        wires.opened(self)
        self.up(lambda: self._reach(address))

    def machines(self) -> set[str]:
        return {self.client.name, self._machine}

    def up(self, arrive: Callable[[], object]) -> None:
        self._up_s = self._up.carry(lambda: self._arrive(arrive), self._up_s)

    def down(self, arrive: Callable[[], object]) -> None:
        self._down_s = self._down.carry(lambda: self._arrive(arrive), self._down_s)

    def _arrive(self, arrive: Callable[[], object]) -> None:
        if not self._severed:
            arrive()

    def _to_handler(self, deliver: Callable[[ServerContext], None]) -> None:
        if self._context is not None:
            deliver(self._context)

    def _reach(self, address: str) -> None:
        self.server = self._wires.server_at(address)
        if self.server is None or self._status is not None:
            self.down(lambda: self.finish(grpc.StatusCode.UNAVAILABLE))
            return
        self._context = self.server.accept(self, self._method)

    def end_died(self, process: Process) -> None:
        self.over = True
        if process is self.client:
            self.up(self._cancel_handler)
        else:
            self.down(lambda: self.finish(grpc.StatusCode.UNAVAILABLE))

    def sever(self) -> None:
        """The connection breaks: what is under way is lost."""
        self.over = self._severed = True
        self._wires.loop.call_later(FASTEST_S, self.finish, grpc.StatusCode.UNAVAILABLE, context=NOBODY)
        self._wires.loop.call_later(FASTEST_S, self._cancel_handler, context=NOBODY)

    def _cancel_handler(self) -> None:
        self.over = True
        if self._context is not None:
            self._context.cancel()

    # --- the client's half

    def finish(self, status: grpc.StatusCode) -> None:
        if self._status is None:
            self.over = True
            self._status = status
            self._inbox.wake()
            if not self._metadata.done():
                self._metadata.set_result(())

    def take(self, raw: bytes) -> None:
        self._inbox.put(raw)

    def take_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        if not self._metadata.done():
            self._metadata.set_result(metadata)

    async def initial_metadata(self) -> tuple[tuple[str, str], ...]:
        return await asyncio.shield(self._metadata)

    async def code(self) -> grpc.StatusCode:
        assert self._status is not None, "asked before the stream is over"
        return self._status

    async def details(self) -> str:
        return "simulated"

    async def read(self) -> Any:
        while not self._inbox and self._status is None:
            await self._inbox.wait()
        if self._inbox:
            raw = self._inbox.pop()
            return self._deserialize(raw) if self._deserialize else raw
        if self._status is grpc.StatusCode.OK:
            return grpc.aio.EOF
        if self._status is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        raise self._error()

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        raw = self._serialize(message) if self._serialize else message
        self.up(lambda: self._to_handler(lambda context: context.take(raw)))

    async def done_writing(self) -> None:
        if self._status is None:
            self.up(lambda: self._to_handler(ServerContext.half_close))

    @property
    def _cython_call(self) -> Stream:
        """What grpc.aio keeps underneath, for those who end it there."""
        return self

    def cancel(self, _details: str = "") -> bool:
        if self._status is not None:
            return False
        self.finish(grpc.StatusCode.CANCELLED)
        self.up(self._cancel_handler)
        return True

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        empty = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self._status, empty, empty, details="simulated")


class _Inbox:
    """Messages that have arrived and were not read yet."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, raw: bytes) -> None:
        self._messages.append(raw)
        self.wake()

    def pop(self) -> bytes:
        return self._messages.popleft()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter


class ServerContext:
    """The server's half of a stream: what a grpc.aio servicer is given."""

    def __init__(self, stream: Stream, handler: Any, process: Process, loop: VirtualLoop) -> None:
        self._stream = stream
        self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
        self._inbox = _Inbox(loop)
        self._half_closed = False
        self._cancelled = False
        self._task = loop.create_task(self._serve(handler.stream_stream), context=process.context.copy())

    async def _serve(self, behaviour: Callable[..., Any]) -> None:
        status = grpc.StatusCode.OK
        try:
            await behaviour(None, self)
        except grpc.aio.AbortError as abort:
            status = abort.args[0]
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            status = grpc.StatusCode.CANCELLED
        self._stream.down(lambda: self._stream.finish(status))

    def take(self, raw: bytes) -> None:
        self._inbox.put(raw)

    def half_close(self) -> None:
        self._half_closed = True
        self._inbox.wake()

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def peer(self) -> str:
        return f"simulated:{self._stream.client.name}"

    async def read(self) -> Any:
        while not self._inbox and not self._half_closed:
            await self._inbox.wait()
        if not self._inbox:
            return grpc.aio.EOF
        raw = self._inbox.pop()
        return self._deserialize(raw) if self._deserialize else raw

    async def write(self, message: Any) -> None:
        raw = self._serialize(message) if self._serialize else message
        self._stream.down(lambda: self._stream.take(raw))

    async def send_initial_metadata(self, metadata: Any) -> None:
        sent = tuple(metadata)
        self._stream.down(lambda: self._stream.take_metadata(sent))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise grpc.aio.AbortError(code, details)


class SimulatedServer:
    """Stands in for grpc.aio.Server: services are added, then `start` listens."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self.process = process
        self._wires = wires
        self._generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same services, by name."""

    def listen(self, address: str) -> None:
        self._wires.listen(address, self)

    def accept(self, stream: Stream, method: str) -> ServerContext | None:
        details = SimpleNamespace(method=method, invocation_metadata=())
        for generic in self._generic:
            handler = generic.service(details)
            if handler is not None:
                return ServerContext(stream, handler, self.process, self._wires.loop)
        stream.down(lambda: stream.finish(grpc.StatusCode.UNIMPLEMENTED))
        return None


class SimulatedChannel:
    """Stands in for what grpc.aio.insecure_channel returns."""

    def __init__(self, wires: Wires, address: str) -> None:
        self._wires = wires
        self._address = address
        self._streams: list[Stream] = []

    async def __aenter__(self) -> SimulatedChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for stream in self._streams:
            stream.cancel()

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[[], Stream]:
        def call() -> Stream:
            process = PROCESS.get()
            assert process is not None, "a stream that belongs to no process"
            codecs = (request_serializer, response_deserializer)
            stream = Stream(self._wires, process, self._address, method, codecs)
            self._streams.append(stream)
            return stream

        return call
