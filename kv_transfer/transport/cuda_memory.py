"""Memory of one GPU for the data plane: plain allocations of the driver, each exported to peers whole, and nothing beside it.

Torch's allocator would not do: what it hands out lies in larger segments, which UCX exports whole, and from expandable segments
it cannot export at all, so that messages go through host memory without a word.

A thread that lets UCX touch GPU memory must have the device's primary context, which torch uses, too.

Must not know: torch, libucx, slots, parcels.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.contact import HANDLE_BYTES
from kv_transfer.transport.peer_mappings import peer_mappings

_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """One contiguous run of GPU memory, alive as long as anybody holds it or a part of it."""

    address: int
    size: int
    device: CudaDevice
    owner: object
    """Frees the allocation when nobody refers to it any more."""

    def __getitem__(self, part: slice) -> DeviceBytes:
        first, end, step = part.indices(self.size)
        assert step == 1, "a run of bytes has no gaps"
        return DeviceBytes(self.address + first, max(0, end - first), self.device, self.owner)

    def __len__(self) -> int:
        return self.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def read(self) -> npt.NDArray[np.uint8]:
        """A copy in host memory. Waits for it."""
        host = np.empty(self.size, np.uint8)
        if self.size:
            self.device.call("cuMemcpyDtoH_v2", host.ctypes.data_as(ctypes.c_void_p), *_place(self))
        return host

    def write(self, values: npt.NDArray[np.uint8]) -> None:
        """Waits until they are there."""
        assert values.size == self.size, f"{values.size} bytes into {self.size}"
        contiguous = np.ascontiguousarray(values)
        place, length = _place(self)
        if self.size:
            self.device.call("cuMemcpyHtoD_v2", place, contiguous.ctypes.data_as(ctypes.c_void_p), length)

    def fill(self, value: int) -> None:
        place, length = _place(self)
        if self.size:
            self.device.call("cuMemsetD8_v2", place, ctypes.c_ubyte(value), length)
            self.device.call("cuCtxSynchronize")


def _place(run: DeviceBytes) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
    return ctypes.c_uint64(run.address), ctypes.c_size_t(run.size)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDevice:
    """GPU `index`, and its primary context, which this keeps alive. Raises TransportError (`cuda_unavailable`)."""

    _handles_of_gpu: ClassVar[defaultdict[int, dict[int, bytes]]] = defaultdict(dict)

    def __init__(self, index: int) -> None:
        self.index = index
        self._handles = self._handles_of_gpu[index]
        """Of what this process has allocated there, by address, whoever asked for it."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError("cuda_unavailable", f"no CUDA driver here: {error}") from error
        self.call("cuInit", ctypes.c_uint(0))
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.use_in_this_thread()

    def use_in_this_thread(self) -> None:
        self.call("cuCtxSetCurrent", self._context)

    def entering(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """A function, and its argument, that a thread of C calls before it touches this GPU's memory."""
        return ctypes.cast(self._driver.cuCtxSetCurrent, ctypes.c_void_p), self._context

    def allocate(self, size: int, *, mapped_by_peers: bool = True) -> DeviceBytes:
        """Zeroed. Peers map it from pairing on, or UCX does itself for each message. Raises TransportError (`out_of_memory`)."""
        assert size > 0, f"{size} bytes"
        self.use_in_this_thread()
        address = ctypes.c_uint64()
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        except TransportError as error:
            raise TransportError("out_of_memory", f"{size >> 20} MiB of slots: {error}") from error
        run = DeviceBytes(address.value, size, self, _Allocation(self, address.value))
        run.fill(0)
        if mapped_by_peers:
            handle = _IpcHandle()
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            self._handles[address.value] = bytes(handle)
        return run

    def handles(self) -> tuple[bytes, ...]:
        """By which peers on this machine can map what is allocated here now."""
        return tuple(self._handles.values())

    def map(self, handles: Sequence[bytes]) -> PeerMemory:
        """Map a peer's memory, or as much of it as can be: that of this very process cannot. Takes milliseconds."""
        self.use_in_this_thread()
        addresses = []
        for handle in handles:
            address = ctypes.c_uint64()
            opened = _IpcHandle.from_buffer_copy(handle)
            with contextlib.suppress(TransportError):
                self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
                addresses.append(address.value)
                if mappings := peer_mappings():
                    mappings.keep(handle, address.value)
        return PeerMemory(self, addresses)

    def free(self, address: int) -> None:
        self._handles.pop(address, None)
        self.use_in_this_thread()
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def call(self, function: str, *arguments: Any) -> None:
        """Raises TransportError (`cuda_failed`) with CUDA's own words."""
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise TransportError("cuda_failed", f"{function}: {(text.value or b'').decode()} ({code})")


class _Allocation:
    def __init__(self, device: CudaDevice, address: int) -> None:
        self._device, self._address = device, address

    def __del__(self) -> None:
        with contextlib.suppress(TransportError):  # the context is gone, and the memory with it
            self._device.free(self._address)


class PeerMemory:
    """A peer's memory, mapped here until `close`, and known to `peer_mappings` for as long: mapping it anew for each burst of
    messages took a hundred times longer than copying."""

    def __init__(self, device: CudaDevice, addresses: Sequence[int]) -> None:
        self._device = device
        self._addresses = list(addresses)

    def close(self) -> None:
        """On a thread that may wait for the GPU. Nobody may read it any more."""
        self._device.use_in_this_thread()
        while self._addresses:
            address = self._addresses.pop()
            if mappings := peer_mappings():
                mappings.drop(address)
            with contextlib.suppress(TransportError):
                self._device.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
