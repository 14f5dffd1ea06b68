"""One UCX worker, and the thread that alone touches it.

The thread is C (`ucx_worker.c`): Python never waits for it, nor it for Python. What is asked is queued in a microsecond or two;
outcomes wake the event loop, which takes as many as there are. Between hosts and in shared memory the thread sleeps until
something happens (what is copied into shared memory, it copies, not the event loop). Beside a GPU it polls, which costs a core:
to be woken by a GPU, UCX has it call the host behind every copy under way, for which the next copy waits.

Must not know: sessions, lanes, what a tag means.
"""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import TypeVar

from foundation.native_library import native_calls
from kv_transfer.transport.base import Bytes, TransportError
from kv_transfer.transport.cuda_memory import CudaDevice, DeviceBytes
from kv_transfer.transport.peer_mappings import peer_mappings

SOURCE = Path(__file__).with_name("ucx_worker.c")
_UCP = "libucp.so.0"

_CONNECT, _RECEIVE, _SEND, _CANCEL, _DESTROY, _DESCRIBE, _DROP_STRAYS = range(7)
_AT_ONCE = 64
"""Outcomes that are taken with one call."""

OK = 0
CANCELED = -16
MESSAGE_TRUNCATED = -9
_STATUS_NAMES = {
    -1: "no_message",
    -2: "no_resource",
    -3: "io_error",
    -4: "no_memory",
    -5: "invalid_param",
    -6: "unreachable",
    -7: "invalid_addr",
    -8: "not_implemented",
    MESSAGE_TRUNCATED: "message_truncated",
    -10: "no_progress",
    -14: "no_device",
    -15: "busy",
    CANCELED: "canceled",
    -20: "timed_out",
    -21: "exceeds_limit",
    -22: "unsupported",
    -23: "rejected",
    -24: "not_connected",
    -25: "connection_reset",
    -80: "endpoint_timeout",
}

Done = Callable[[int], None]
"""What hears how an operation has ended: OK, or UCX's status."""


def status_name(status: int) -> str:
    """`canceled`, say; `ok` for 0."""
    return "ok" if status == OK else _STATUS_NAMES.get(status, f"ucx_error_{-status}")


Ended = Callable[[int, int], None]
"""What hears of any order: its status, and its value."""

Read = TypeVar("Read")


class _Outcome(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint64), ("value", ctypes.c_uint64), ("status", ctypes.c_int64))


class UcxEndpoint:
    """The way to one peer's worker. Nothing may be asked of it once `destroy` or `abandon` has been called: what it was lies in
    memory that is given back as soon as the last operation has ended, which is told later."""

    def __init__(self, worker: UcxWorker, handle: int, number: int) -> None:
        self._failed = False
        self._failure_heard: Callable[[], None] | None = None
        self._worker = worker
        self._standing: int | None = handle
        self._number = number

    def on_failure(self, heard: Callable[[], None]) -> None:
        """`heard` is called when it fails, unless it is destroyed before, and ahead of what its operations are told for that
        reason; soon, if it has failed already."""
        self._failure_heard = heard
        if self._failed:
            self._worker.soon(heard)

    def fail(self) -> None:
        """UCX says so, to the worker."""
        self._failed = True
        if self._failure_heard is not None:
            self._failure_heard()

    def send(self, tag: int, buffer: Bytes, done: Done) -> int:
        """The operation's number. `buffer` is kept until `done`."""
        return self._worker.message(_SEND, self._handle, tag, buffer, done)

    def receive(self, tag: int, buffer: Bytes, done: Done) -> int:
        return self._worker.message(_RECEIVE, self._handle, tag, buffer, done)

    def cancel(self, operation: int) -> None:
        """It ends soon, one way or the other."""
        self._worker.order(_CANCEL, self._handle, operation)

    def abandon(self) -> None:
        """As `destroy`, which nobody waits for."""
        self._worker.order(_DESTROY, self._last_handle())

    async def destroy(self) -> None:
        """Never waits for the peer. UCX cancels what is under way, as far as it can, and tells of each how it ended."""
        await self._worker.ask(_DESTROY, self._last_handle(), read=int)

    async def describe(self) -> str:
        """What ucp_ep_print_info says."""
        return await self._worker.ask(_DESCRIBE, self._handle, read=_taken_text)

    @property
    def _handle(self) -> int:
        assert self._standing is not None, "this endpoint is destroyed"
        return self._standing

    def _last_handle(self) -> int:
        handle, self._standing = self._handle, None
        self._worker.forget(self._number)
        return handle


class UcxWorker:
    """Made and used on the asyncio thread, where all outcomes are told. With a `device` its thread may touch GPU memory."""

    def __init__(self, device: CudaDevice | None = None) -> None:
        """Raises TransportError (`ucx_unavailable`), SetupError."""
        if device is not None:
            peer_mappings()
        self._loop = asyncio.get_running_loop()
        library, self._quick = _libraries()
        self._device = device
        """Its context must live as long as the thread."""
        self._numbers = count(1)
        self._open: dict[int, tuple[Ended, Bytes | None]] = {}
        """Who hears of an order's end, and the memory that UCX has until then."""
        self._endpoints: dict[int, UcxEndpoint] = {}
        """Endpoints that have not failed, by their numbers."""
        self._outcomes = (_Outcome * _AT_ONCE)()
        status = ctypes.c_int()
        entering = (None, None) if device is None else device.entering()
        handle = library.ucx_worker_open(int(device is not None), *entering, ctypes.byref(status))
        if not handle:
            raise TransportError("ucx_unavailable", f"UCX cannot start with this UCX_TLS: {status_name(status.value)}")
        self._handle = ctypes.c_void_p(handle)
        self._end = weakref.finalize(self, library.ucx_worker_close, self._handle)
        """Also when the interpreter ends: UCX would be taken apart beside its thread."""
        length = ctypes.c_size_t()
        self.address: bytes = ctypes.string_at(
            library.ucx_worker_address(self._handle, ctypes.byref(length)), length.value
        )
        """What a peer needs to make an endpoint to this worker."""
        self._fd: int = library.ucx_worker_outcome_fd(self._handle)
        self._loop.add_reader(self._fd, self._take)

    async def endpoint(self, peer_address: bytes) -> UcxEndpoint:
        """Raises TransportError (`unreachable`). One that nobody waits for any more is destroyed as soon as it is made."""
        made: asyncio.Future[UcxEndpoint] = self._loop.create_future()

        def ended(status: int, handle: int) -> None:
            if status != OK:
                if not made.done():
                    made.set_exception(
                        TransportError("unreachable", f"no UCX lane to this peer: {status_name(status)}")
                    )
                return
            endpoint = self._endpoints[number] = UcxEndpoint(self, handle, number)
            if made.done():
                endpoint.abandon()
            else:
                made.set_result(endpoint)

        number = self.order(_CONNECT, None, buffer=peer_address, length=len(peer_address), ended=ended)
        try:
            return await made
        except asyncio.CancelledError:
            if not made.cancelled() and made.exception() is None:  # it came just before
                made.result().abandon()
            raise

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def forget(self, endpoint: int) -> None:
        """That it fails is no news any more."""
        self._endpoints.pop(endpoint, None)

    def message(self, kind: int, endpoint: int, tag: int, buffer: Bytes, done: Done) -> int:
        address = _address_of(buffer)
        return self.order(kind, endpoint, tag, address, buffer.size, lambda status, value: done(status), buffer)

    async def drop_unexpected(self, tag: int, mask: int) -> int:
        """Take out small messages that nobody posted for and whose tag agrees with `tag` where `mask` has ones; how many.

        Large ones hold no memory here and end with their endpoint.
        """
        return await self.ask(_DROP_STRAYS, None, tag, mask, read=int)

    async def ask(
        self, kind: int, endpoint: int | None, tag: int = 0, length: int = 0, *, read: Callable[[int], Read]
    ) -> Read:
        """The value of the order's outcome, which is read also when nobody waits for it any more."""
        answer: asyncio.Future[Read] = self._loop.create_future()

        def ended(status: int, value: int) -> None:
            found = read(value)
            if not answer.done():
                answer.set_result(found)

        self.order(kind, endpoint, tag, length=length, ended=ended)
        return await answer

    def order(
        self,
        kind: int,
        endpoint: int | None,
        tag: int = 0,
        buffer: int | bytes | None = None,
        length: int = 0,
        ended: Ended | None = None,
        kept: Bytes | None = None,
    ) -> int:
        """Have the thread do it, after what it was given before; its number. `kept`: alive until it has ended."""
        assert self._end.alive, "this worker is closed"
        number = next(self._numbers)
        if ended is not None:
            self._open[number] = ended, kept
        self._quick.ucx_worker_order(self._handle, kind, number, endpoint, buffer, length, tag)
        return number

    async def close(self) -> None:
        """Every endpoint must be destroyed before. From the call on nothing may be asked of it."""
        if ending := self._end.detach():
            _, close, arguments, _ = ending
            self._loop.remove_reader(self._fd)
            await asyncio.to_thread(close, *arguments)

    def _take(self) -> None:
        if self._end.alive:
            taken = self._quick.ucx_worker_take(self._handle, self._outcomes, _AT_ONCE)
            self._tell(deque((it.number, it.status, it.value) for it in self._outcomes[:taken]))

    def _tell(self, outcomes: deque[tuple[int, int, int]]) -> None:
        """Whatever one of those who hear raises, the others hear too."""
        try:
            while outcomes:
                number, status, value = outcomes.popleft()
                ended, _ = self._open.pop(number, (None, None))
                if ended is not None:
                    ended(status, value)
                elif endpoint := self._endpoints.pop(number, None):
                    endpoint.fail()
        finally:
            if outcomes:
                self._loop.call_soon(self._tell, outcomes)


def transports_described() -> str:
    """What ucp_context_print_info says of this machine. Raises TransportError (`ucx_unavailable`), SetupError."""
    library, _ = _libraries()
    text = library.ucx_context_described()
    if not text:
        raise TransportError("ucx_unavailable", "UCX does not start")
    return _taken_text(text)


def ucx_version() -> str:
    """Of the library that is loaded, as in `1.21.0`. Raises TransportError (`ucx_unavailable`), SetupError."""
    _libraries()
    version = ctypes.CDLL(_UCP).ucp_get_version_string
    version.restype = ctypes.c_char_p
    return str(version().decode())


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """SOURCE, over the UCX that `libucx` chooses: `slow` and `quick`."""
    import libucx

    try:
        libucx.load_library()
        ctypes.CDLL(_UCP, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise TransportError("ucx_unavailable", f"UCX cannot be loaded: {error}") from error
    headers = Path(libucx.__file__).parent / "include"
    library, quick = native_calls(SOURCE, "transfers", ("-O2", f"-I{headers}"))
    pointer, number, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    library.ucx_worker_open.restype = library.ucx_worker_address.restype = library.ucx_context_described.restype = (
        pointer
    )
    library.ucx_worker_open.argtypes = (ctypes.c_int, pointer, pointer, pointer)
    quick.ucx_worker_order.restype = None
    quick.ucx_worker_order.argtypes = (pointer, ctypes.c_int, number, pointer, pointer, size, number)
    quick.ucx_worker_take.argtypes = (pointer, pointer, ctypes.c_int)
    return library, quick


def _address_of(buffer: Bytes) -> int:
    found: object = buffer
    if isinstance(found, DeviceBytes):
        return found.address
    assert buffer.flags.c_contiguous, "a message in pieces"
    return int(buffer.ctypes.data)


def _taken_text(pointer: int) -> str:
    """Of C's, which is freed."""
    text = ctypes.string_at(pointer).decode()
    libc = ctypes.CDLL(None)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.free(pointer)
    return text
