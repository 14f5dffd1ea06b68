"""Kernels that a thread of C launches on one stream of a GPU, in the order asked for. Whoever asks, on the asyncio thread, waits
neither for the driver nor for the interpreter, and is called there when a kernel has ended.

A Python thread did the same before: it wanted the interpreter to hear of a job, to launch it, and to tell its end, and on a busy
node waited for it up to 390 microseconds a launch, and 100 to 250 until an end was told.

    asyncio: ask -> place filled -> semaphore -> C: launch, event, look until it is over -> eventfd -> asyncio: place read, told

Invariants: at most AT_ONCE have been asked of the thread and not been told; a place is filled again only after its kernel has
ended and the place has been read.

Must not know: what kernels do, pools, torch, Triton.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from foundation.errors import SetupError
from foundation.native_library import native_calls
from kv_transfer.transport.base import TransportError

SOURCE = Path(__file__).with_suffix(".c")
AT_ONCE = 8
"""Kernels that may be on their way; more than the GPU does while the host launches one."""
ARGUMENT_BYTES = 256

_DRIVER_CALLS = ("cuLaunchKernel", "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery")
_ERROR_SHIFT = 32


class Launch(NamedTuple):
    """What the driver wants to know. `function`: its handle; `programs`: thread blocks, of `threads` each; `arguments`: as they
    lie in the kernel's parameter memory, ARGUMENT_BYTES at most."""

    function: int
    programs: int
    threads: int
    shared_bytes: int
    arguments: bytes


Begin = Callable[[int], Launch]
"""Fills a place, one of AT_ONCE that are given by their numbers, and says what is launched over it. Called once it is free."""
End = Callable[[int], Callable[[], None]]
"""Reads a place whose kernel has ended; what it returns is called once others have their places."""


class DeviceLaunches:
    """Made on the asyncio thread, where it is used and calls back, never from within `ask`.

    `failure` ends with a TransportError (`cuda_failed`) in CUDA's own words when the GPU does not do what it should, or with what
    a `Begin` has raised: nothing more is launched.
    """

    def __init__(self, driver: ctypes.CDLL, entering: tuple[ctypes.c_void_p, ctypes.c_void_p], stream: int) -> None:
        """`driver`: libcuda, or what stands in for it in tests; `entering`: `CudaDevice.entering()`; `stream`: its handle. Raises
        SetupError."""
        self._slow, self._quick = launch_libraries()
        self._driver = driver
        calls = (ctypes.cast(getattr(driver, call), ctypes.c_void_p).value for call in _DRIVER_CALLS)
        thread = self._slow.launches_begin((ctypes.c_void_p * len(_DRIVER_CALLS))(*calls), *entering, stream)
        if thread is None:
            raise SetupError("no thread, memory or descriptor is left for the launches of a GPU's transfers")
        self._thread: int | None = thread
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[tuple[Begin, End]] = deque()
        self._none_waits = asyncio.Event()
        self._none_waits.set()
        self._begun = 0
        self._launched: deque[tuple[End, int]] = deque()
        self._untold: deque[Callable[[], None]] = deque()
        self._loop.add_reader(self._quick.launches_descriptor(thread), self._hear, thread)

    def ask(self, begin: Begin, end: End) -> None:
        self._waiting.append((begin, end))
        self._none_waits.clear()
        self._launch_what_fits()

    async def close(self) -> None:
        """Finishes what was asked for, then ends the thread. What is asked for meanwhile may never begin."""
        await self._none_waits.wait()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        await asyncio.to_thread(self._slow.launches_finish, thread)
        try:
            self._hear(thread)
        finally:
            self._loop.remove_reader(self._quick.launches_descriptor(thread))
            self._quick.launches_free(thread)
            if not self.failure.done():
                self.failure.cancel()

    def _launch_what_fits(self) -> None:
        try:
            while (
                self._waiting and len(self._launched) < AT_ONCE and not self.failure.done() and self._thread is not None
            ):
                self._launch(self._thread, *self._waiting.popleft())
        except Exception as error:  # a place is filled when it is free: who asked need not be there to hear of it
            self._fail(error)
        if not self._waiting or self.failure.done():
            self._none_waits.set()

    def _launch(self, thread: int, begin: Begin, end: End) -> None:
        place = self._begun % AT_ONCE
        launch = begin(place)
        assert len(launch.arguments) <= ARGUMENT_BYTES, f"arguments of {len(launch.arguments)} bytes"
        self._begun += 1
        self._launched.append((end, place))
        self._quick.launches_ask(thread, *launch, len(launch.arguments))

    def _hear(self, thread: int) -> None:
        told = self._quick.launches_told(thread)
        for _ in range(told & (1 << _ERROR_SHIFT) - 1):
            end, place = self._launched.popleft()
            self._untold.append(end(place))
        if error := told >> _ERROR_SHIFT:
            self._fail(self._cuda_error(error))
        self._launch_what_fits()
        self._tell()

    def _tell(self) -> None:
        """One that raises, of which the loop hears, does not keep the others from being told."""
        try:
            while self._untold:
                self._untold.popleft()()
        finally:
            if self._untold:
                self._loop.call_soon(self._tell)

    def _cuda_error(self, code: int) -> TransportError:
        words = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(words))
        return TransportError("cuda_failed", f"a copy on the GPU: {(words.value or b'').decode()} ({code})")

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)


@cache
def launch_libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """SOURCE, for calls that may wait, and for those so short that the interpreter is kept. About a second the first time on a
    machine. Raises SetupError."""
    flags = ("-O2", f"-DAT_ONCE={AT_ONCE}", f"-DARGUMENT_BYTES={ARGUMENT_BYTES}")
    slow, quick = native_calls(SOURCE, "transfers of a GPU's KV", flags)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    slow.launches_begin.restype = pointer
    slow.launches_begin.argtypes = (pointer,) * 4
    slow.launches_finish.restype = quick.launches_ask.restype = quick.launches_free.restype = None
    slow.launches_finish.argtypes = quick.launches_descriptor.argtypes = quick.launches_free.argtypes = (pointer,)
    quick.launches_ask.argtypes = (pointer, pointer, number, number, number, ctypes.c_char_p, ctypes.c_size_t)
    quick.launches_told.argtypes = (pointer,)
    quick.launches_told.restype = ctypes.c_uint64
    return slow, quick
