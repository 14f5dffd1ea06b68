"""What one side of a session must know to reach the other: the address of its UCX worker, and handles of the GPU memory that it
sends from and receives into.

    crc32 of what follows u32 | handles u16 | 64 bytes each | worker address

UCX takes the address of a worker as it is: one that is cut off or damaged ends this process, by an assertion or by what lies
behind it in memory.

Must not know: libucx, CUDA, sessions.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from kv_transfer.transport.base import TransportError

HANDLE_BYTES = 64
HANDLES_AT_MOST = 64
_CHECK = struct.Struct("<I")
_COUNT = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Contact:
    worker_address: bytes
    memory_handles: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        assert len(self.memory_handles) <= HANDLES_AT_MOST, f"{len(self.memory_handles)} allocations are exported"
        said = _COUNT.pack(len(self.memory_handles)) + b"".join(self.memory_handles) + self.worker_address
        return _CHECK.pack(zlib.crc32(said)) + said


def read_contact(text: bytes) -> Contact:
    """Raises TransportError (`garbage`)."""
    check, said = text[: _CHECK.size], text[_CHECK.size :]
    if check != _CHECK.pack(zlib.crc32(said)):
        raise TransportError("garbage", f"a contact of {len(text)} bytes that was damaged on its way")
    count = _COUNT.unpack_from(said)[0] if len(said) > _COUNT.size else HANDLES_AT_MOST + 1
    end = _COUNT.size + count * HANDLE_BYTES
    if count > HANDLES_AT_MOST or len(said) <= end:
        raise TransportError("garbage", f"a contact of {len(text)} bytes that should name {count} pieces of memory")
    handles = tuple(said[first : first + HANDLE_BYTES] for first in range(_COUNT.size, end, HANDLE_BYTES))
    return Contact(said[end:], handles)
