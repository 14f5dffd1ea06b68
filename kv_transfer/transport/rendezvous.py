"""How two nodes exchange what it takes to reach each other (`contact`), and how a session's end is noticed at once on every lane.

D connects to P's data address over plain TCP and says which session it is; P answers only for a session that it expects, so
a stranger never reaches UCX. The connection then stays open, silent, as the session's lifeline: the kernel closes it when
the peer dies, however it dies, while UCX notices late over shared memory and never while the dead process is unreaped.

(UCX's own listener does the exchange too, but it takes every interface and every caller, and endpoints made by it carried
0.5 GB/s over shared memory where those made from addresses carried 5.)

    D -> P   magic (8) | session u64 | greeting tag u64 | length u32 | contact
    P -> D   verdict u8 (1: welcome, 0: not expected) | length u32 | contact

Must not know: libucx, tags, lanes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from dataclasses import dataclass

from kv_transfer.transport.base import TransportError

MAGIC = b"DECANT\x00\x02"
ADDRESS_LIMIT_BYTES = 64 * 1024
HANDSHAKE_LIMIT_S = 5.0

_CALL = struct.Struct("<8sQQI")
_ANSWER = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class Call:
    """What D says when it dials."""

    session: int
    greeting_tag: int
    contact: bytes


class Lifeline:
    """The open connection of one session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        _watch_for_silence(writer)

    async def until_lost(self) -> str:
        """The reason why the peer is gone. Nothing may be said on a lifeline."""
        try:
            said = await self._reader.read(1)
        except OSError as error:
            return f"lifeline_{errno.errorcode.get(error.errno or 0, 'error').lower()}"
        return "lifeline_garbage" if said else "peer_closed"

    def close(self) -> None:
        self._writer.close()


def _watch_for_silence(writer: asyncio.StreamWriter) -> None:
    """A peer that vanished without a word (power, cable) is noticed by the kernel within about three seconds."""
    sock: socket.socket = writer.get_extra_info("socket")
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def read_call(reader: asyncio.StreamReader) -> Call:
    """Raises TransportError (`garbage`) when the caller does not speak this protocol."""
    try:
        magic, session, greeting_tag, length = _CALL.unpack(await reader.readexactly(_CALL.size))
        if magic != MAGIC or not 0 < length <= ADDRESS_LIMIT_BYTES:
            raise TransportError("garbage", "a caller on the data port does not speak this protocol")
        return Call(session, greeting_tag, await reader.readexactly(length))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise TransportError("garbage", f"a caller on the data port hung up: {error}") from error


def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(_ANSWER.pack(0, 0))
    writer.close()


def welcome(writer: asyncio.StreamWriter, contact: bytes) -> None:
    writer.write(_ANSWER.pack(1, len(contact)) + contact)


async def place_call(address: str, call: Call) -> tuple[bytes, Lifeline]:
    """P's worker address. Raises TransportError (`bad_address`, `unreachable`, `not_expected`, `garbage`)."""
    host, port = split_address(address)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise TransportError("unreachable", f"data address {address}: {error}") from error
    try:
        writer.write(_CALL.pack(MAGIC, call.session, call.greeting_tag, len(call.contact)) + call.contact)
        verdict, length = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
        if verdict != 1:
            raise TransportError("not_expected", f"{address} does not expect session {call.session:#x}")
        if not 0 < length <= ADDRESS_LIMIT_BYTES:
            raise TransportError("garbage", f"{address} answered with an address of {length} bytes")
        return await reader.readexactly(length), Lifeline(reader, writer)
    except (OSError, asyncio.IncompleteReadError) as error:
        writer.close()
        raise TransportError("unreachable", f"{address} hung up during the handshake: {error}") from error
    except BaseException:
        writer.close()
        raise


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise TransportError("bad_address", f"data address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def bind_data_port(host: str, port: int) -> socket.socket:
    """A listening socket on exactly this address. Raises TransportError (`address_in_use`, `bad_address`)."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TransportError("bad_address", f"--data-host {host!r} does not resolve: {error}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise TransportError("address_in_use", f"--data-port {port} on {host} is taken; choose another") from error
        raise TransportError("bad_address", f"--data-host {host!r}, --data-port {port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock
