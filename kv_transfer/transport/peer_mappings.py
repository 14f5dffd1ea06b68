"""What sessions keep mapped of their peers' memory, so that UCX need not ask the driver for each message that it reads.

UCX maps a peer's allocation before it reads a message from it, and unmaps it afterwards. Where that is mapped already both are
cheap to the driver's books, but `cuIpcCloseMemHandle` waits until the whole GPU is idle, and every thread that launches anything
meanwhile waits with it: measured on an H200, 5 ms beside a kernel of 5 ms, and a launch beside copies took 2.8 ms instead of
0.012. A decode node's GPU is never idle. UCX's own cache of mappings avoids that, but keeps a dead peer's memory for as long as
this process lives (openucx/ucx#11753). So a small library of C stands before the driver's two functions, for UCX alone: it is
loaded into the global scope before UCX's CUDA module, whose calls the dynamic linker then binds to it. It answers for what is
kept here, and passes everything else on.

Invariant: what is kept is mapped; it is dropped before it is unmapped, behind the session's fence, when UCX reads it no more.
One GPU a process: a handle has one address.

Must not know: libucx, sessions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from foundation.native_library import native_calls

SOURCE = Path(__file__).with_name("peer_mappings.c")


class PeerMappings:
    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        """`library`: of SOURCE, in the global scope. `driver`: libcuda, or what stands in for it in tests."""
        self._library = library
        self._library.mappings_answered.restype = ctypes.c_longlong
        self._library.mappings_stand_before(
            ctypes.cast(driver.cuIpcOpenMemHandle_v2, ctypes.c_void_p),
            ctypes.cast(driver.cuIpcCloseMemHandle, ctypes.c_void_p),
        )

    @property
    def answered(self) -> int:
        """How often UCX has asked for what is kept here. 0 after messages from a peer on this machine: it asks the driver."""
        return int(self._library.mappings_answered())

    def keep(self, handle: bytes, address: int) -> None:
        """`handle` is mapped at `address`. Without room (4,096) UCX asks the driver for it."""
        self._library.mappings_keep(handle, ctypes.c_uint64(address))

    def drop(self, address: int) -> None:
        """Once for each `keep`."""
        self._library.mappings_drop(ctypes.c_uint64(address))


@cache
def peer_mappings() -> PeerMappings | None:
    """This process's; to be called before UCX is loaded. None where no driver is. Raises SetupError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library, _ = native_calls(SOURCE, "transfers of a GPU's KV", ("-O2",), mode=ctypes.RTLD_GLOBAL)
    return PeerMappings(library, driver)
