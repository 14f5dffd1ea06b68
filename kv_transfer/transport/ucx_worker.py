"""One UCX worker, and the threads that keep it going.

UCX's progress thread is C++ and sleeps in epoll until something happens (0.01 % of a core when idle, against 4 % with the
binding's default of looking every millisecond). Beside a GPU it polls, which costs a core: to be woken by a GPU, UCX has it call
the host behind every copy under way, for which the next copy waits. The thread also submits what the asyncio thread hands over,
so that a copy into shared memory never runs on the event loop. The notifier thread sleeps until requests have completed and then
has the event loop complete their futures.

A request is cancelled when its handle is dropped, so whoever starts one holds the handle until the future is done. Dropping
an open one is deadly beside a running progress thread: the canceller holds the request's lock and wants the worker's, the
progress thread, completing that very request, holds the worker's and wants the request's (seen: both hang for ever, and the
interpreter lock with them). So `cancel` stops progress for the moment that it takes.

What may block for a moment runs on one control thread, in order: making, describing and destroying endpoints, cancelling.

Must not know: sessions, lanes, tags.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from kv_transfer.transport.base import Bytes, TransportError
from kv_transfer.transport.cuda_memory import CudaDevice
from kv_transfer.transport.peer_mappings import peer_mappings

Done = TypeVar("Done")

_CLOSE_TRY_NS = 5 * 10**9
_CLOSE_TRIES = 24
"""UCX's thread is given two minutes in all, which it needs only when this process, or that thread, stood still: the binding
gives up in silence, and then an endpoint that was taken for destroyed lives on."""
_STRAYS_AT_ONCE = 1024
_STRAY_LIMIT_BYTES = 64 * 1024


class HoldsRequest(Protocol):
    request: Any


class UcxEndpoint:
    """The way to one peer's worker. All operations return the binding's request, which has a `future`."""

    def __init__(self, handle: Any, tag: Callable[[int], Any], array: Callable[[Bytes], Any]) -> None:
        """`tag` and `array` are the binding's, which is imported only where there is a worker."""
        self._handle = handle
        self._tag = tag
        self._array = array

    def tag_send(self, tag: int, buffer: Bytes) -> Any:
        return self._handle.tag_send(self._array(buffer), self._tag(tag))

    def tag_receive(self, tag: int, buffer: Bytes) -> Any:
        return self._handle.tag_recv(self._array(buffer), self._tag(tag))

    def on_close(self, callback: Any) -> None:
        """`callback()` runs on UCX's thread when the endpoint fails or is closed; at once when it has failed already."""
        try:
            self._handle.set_close_callback(callback)
        except RuntimeError:  # no other reason: it has failed since it was made
            callback()

    def destroy(self) -> None:
        """Blocks until UCX's thread has done it, usually microseconds; never for the peer: pending operations are cancelled."""
        self._handle.close_blocking(period=_CLOSE_TRY_NS, max_attempts=_CLOSE_TRIES)
        self._handle.remove_close_callback()

    def describe(self) -> str:
        """What ucp_ep_print_info says. Blocks for a millisecond or so."""
        libc, libucp = ctypes.CDLL(None), ctypes.CDLL("libucp.so.0")
        libc.open_memstream.restype = ctypes.c_void_p
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
        libucp.ucp_ep_print_info(ctypes.c_void_p(self._handle.handle), stream)
        libc.fclose(stream)
        described = (text.value or b"").decode()
        libc.free(text)
        return described


class UcxWorker:
    """Made on the asyncio thread, whose loop completes all futures. With a `device` its threads may touch GPU memory."""

    def __init__(self, device: CudaDevice | None = None) -> None:
        if device is not None:
            peer_mappings()
        import ucxx._lib.libucxx as binding
        from ucxx._lib.arr import Array

        self._binding = binding
        self._array = Array
        self._device = device
        enter = _do_nothing if device is None else device.use_in_this_thread
        self._loop = asyncio.get_running_loop()
        self._strays: dict[int, tuple[Any, Bytes]] = {}
        self._to_cancel: list[HoldsRequest] = []
        self._control = ThreadPoolExecutor(1, "ucx-control", initializer=enter)
        try:
            self._context = binding.UCXContext({})
            self._worker = binding.UCXWorker(self._context, enable_delayed_submission=True, enable_python_future=True)
        except binding.UCXError as error:
            raise TransportError("ucx_unavailable", f"UCX cannot start with this UCX_TLS: {error}") from error
        assert self._worker.enable_python_future, "this ucxx was built without Python futures"
        self._worker.set_progress_thread_start_callback(enter)
        self._start_progress()
        self._notifier = threading.Thread(target=self._notify, name="ucx-notifier", daemon=True)
        self._notifier.start()

    @property
    def address(self) -> bytes:
        """What a peer needs to make an endpoint to this worker."""
        return bytes(self._worker.address)

    async def endpoint(self, peer_address: bytes) -> UcxEndpoint:
        """Raises TransportError (`unreachable`). One that nobody waits for any more is destroyed as soon as it is made."""
        making = self.start(partial(self._make_endpoint, peer_address))
        try:
            return await asyncio.wrap_future(making)
        except asyncio.CancelledError:
            self.start(partial(_destroy_unwanted, making))
            raise

    def _make_endpoint(self, peer_address: bytes) -> UcxEndpoint:
        try:
            address = self._binding.UCXAddress.create_from_buffer(peer_address)
            handle = self._binding.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        except self._binding.UCXError as error:
            raise TransportError("unreachable", f"no UCX lane to this peer: {error}") from error
        return UcxEndpoint(handle, self._binding.UCXXTag, self._array)

    def start(self, blocking: Callable[[], Done]) -> Future[Done]:
        """Have the control thread run it, after what it was given before."""
        return self._control.submit(blocking)

    async def run(self, blocking: Callable[[], Done]) -> Done:
        """Run it on the control thread."""
        return await self._loop.run_in_executor(self._control, blocking)

    def cancel(self, holder: HoldsRequest) -> None:
        """Drop the handle, of which the holder's must be the only reference. Its future ends soon, one way or the other."""
        self._to_cancel.append(holder)
        if len(self._to_cancel) == 1:
            self._control.submit(self._cancel_all)

    def _cancel_all(self) -> None:
        self._worker.stop_progress_thread()
        while self._to_cancel:
            self._to_cancel.pop().request = None
        self._start_progress()

    def _start_progress(self) -> None:
        beside_gpu = self._device is not None
        self._worker.start_progress_thread(polling_mode=beside_gpu, epoll_timeout=-1)

    def drop_unexpected(self, tag: int, mask: int) -> int:
        """Take out small messages that nobody posted for and whose tag agrees with `tag` where `mask` has ones; how many.

        Large ones hold no memory here and end with their endpoint.
        """
        binding = self._binding
        where = binding.UCXXTag(tag), binding.UCXXTagMask(mask)
        for dropped in range(_STRAYS_AT_ONCE):
            found = self._worker.tag_probe(*where, False)
            if not found.matched or found.length > _STRAY_LIMIT_BYTES:
                return dropped
            buffer = np.empty(max(found.length, 1), np.uint8)
            request = self._worker.tag_recv_with_handle(self._array(buffer), self._worker.tag_probe(*where, True))
            # Held until it is done, as every request and buffer must be.
            self._strays[id(request)] = request, buffer
            request.future.add_done_callback(partial(self._stray_dropped, id(request)))
        return _STRAYS_AT_ONCE

    def _stray_dropped(self, key: int, future: asyncio.Future[Any]) -> None:
        del self._strays[key]
        future.cancelled() or future.exception()

    async def close(self) -> None:
        """Every endpoint must be destroyed before."""
        await self.run(self._stop)
        self._control.shutdown(wait=False)

    def _stop(self) -> None:
        self._worker.stop_request_notifier_thread()
        self._notifier.join()
        self._worker.stop_progress_thread()

    def _notify(self) -> None:
        worker, states = self._worker, self._binding.PythonRequestNotifierWaitState
        asyncio.set_event_loop(self._loop)
        while True:
            worker.populate_python_futures_pool()
            if worker.wait_request_notifier(period_ns=0) == states.Shutdown:
                break
            try:
                self._loop.call_soon_threadsafe(worker.run_request_notifier)
            except RuntimeError:  # the loop was closed under us: nobody is left to be told
                break
        worker.clear_python_futures_pool()


def _do_nothing() -> None:
    pass


def _destroy_unwanted(made: Future[UcxEndpoint]) -> None:
    if not made.cancelled():
        made.result().destroy()
