"""What one side of a session must know to reach the other: the address of its UCX worker, and handles of the GPU memory that it
sends from and receives into.

    handles u16 | 64 bytes each | worker address

Must not know: ucxx, CUDA, sessions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.transport.base import TransportError

HANDLE_BYTES = 64
HANDLES_AT_MOST = 64
_COUNT = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Contact:
    worker_address: bytes
    memory_handles: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        assert len(self.memory_handles) <= HANDLES_AT_MOST, f"{len(self.memory_handles)} allocations are exported"
        return _COUNT.pack(len(self.memory_handles)) + b"".join(self.memory_handles) + self.worker_address


def read_contact(text: bytes) -> Contact:
    """Raises TransportError (`garbage`)."""
    count = _COUNT.unpack_from(text)[0] if len(text) > _COUNT.size else HANDLES_AT_MOST + 1
    end = _COUNT.size + count * HANDLE_BYTES
    if count > HANDLES_AT_MOST or len(text) <= end:
        raise TransportError("garbage", f"a contact of {len(text)} bytes that should name {count} pieces of memory")
    handles = tuple(text[first : first + HANDLE_BYTES] for first in range(_COUNT.size, end, HANDLE_BYTES))
    return Contact(text[end:], handles)
