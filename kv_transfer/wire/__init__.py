"""Translates control messages: protobuf on the wire, `kv_transfer.protocol.messages` inside; `writing` is the other direction.

`reading` is total: any bytes become an `Envelope` or a `WireRefusal` that names what is wrong, never an exception, and every
number that gets past here is in its range. A refused message ends its stream; nothing of it reaches the protocol.

Must not know: streams, sessions, states.
"""

from kv_transfer.wire.reading import WireRefusal, read_envelope
from kv_transfer.wire.writing import write_envelope, write_fingerprint

__all__ = ["WireRefusal", "read_envelope", "write_envelope", "write_fingerprint"]
