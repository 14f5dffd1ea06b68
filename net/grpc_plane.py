"""How a process dials and serves gRPC: in the clear, or under TLS with the certificates of `foundation.tls`.

The *internal plane* (routers, nodes, the embedded registry) is one object for each process, handed to whatever dials or listens
there. Under TLS it is mutual: a peer without a certificate of the same authority gets no further than the handshake. Certificates
that are renewed are used from the next handshake on.

Must not know: services, nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from foundation.log import get_logger
from foundation.tls import TlsIdentity, internal_files, read_member, tls_failure

log = get_logger()

ChannelOptions = Sequence[tuple[str, Any]]
HANDSHAKE_LIMIT_MS = 10_000
MOST_PEERS = 4096


class GrpcPlane:
    """`identity` None: in the clear. `server_name`: the name that every peer's certificate carries, where addresses are not in
    them. `failed` counts failed handshakes by name (`foundation.tls.TLS_FAILURES`)."""

    def __init__(
        self,
        identity: TlsIdentity | None = None,
        server_name: str | None = None,
        failed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.identity = identity
        self._failed = failed
        self._said: dict[str, str] = {}
        self._name_options: ChannelOptions = ()
        if server_name is not None:
            self._name_options = (("grpc.ssl_target_name_override", server_name),)

    def channel(self, address: str, options: ChannelOptions = ()) -> grpc.aio.Channel:
        if self.identity is None:
            return grpc.aio.insecure_channel(address, options=options)
        own = self.identity.current()
        credentials = grpc.ssl_channel_credentials(own.authority, own.private_key, own.chain)
        return grpc.aio.secure_channel(address, credentials, options=(*options, *self._name_options))

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """The port that the server will listen on. Raises RuntimeError when it cannot."""
        if self.identity is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(self.identity))

    def why_lost(self, peer: str, code: grpc.StatusCode, details: str | None) -> str:
        """Why a call ended, by name. A handshake that failed is counted, and logged: certificates need a person."""
        name = tls_failure(details or "") if self.identity is not None else None
        if name is None:
            return f"stream_{code.name.lower()}"
        self._failed(name)
        if self._said.get(peer) != name:  # a peer is dialled again and again
            self._said = {**self._said, peer: name} if len(self._said) < MOST_PEERS else {peer: name}
            log.warning("tls handshake failed", peer=peer, reason=name, problem=details)
        return f"tls_{name}"


IN_THE_CLEAR = GrpcPlane()


def internal_plane(
    certificate: str | None,
    private_key: str | None,
    authority: str | None,
    *,
    server_name: str | None = None,
    own_name: str | None = None,
    failed: Callable[[str], None] = lambda name: None,
) -> GrpcPlane:
    """The internal plane as a process's options describe it. `own_name`: under which others dial this process, if known.

    Raises ConfigurationError.
    """
    files = internal_files(certificate, private_key, authority)
    if files is None:
        return GrpcPlane()
    return GrpcPlane(read_member(files, server_name or own_name), server_name, failed)


def server_credentials(identity: TlsIdentity) -> grpc.ServerCredentials:
    """Asks clients for a certificate if the identity names an authority of theirs."""
    served = identity.current()
    mutual = bool(served.authority)

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority = served.authority if mutual else None
        return grpc.ssl_server_certificate_configuration([(served.private_key, served.chain)], authority)

    def renewed() -> Any:
        """Asked before each handshake, from a thread of gRPC's; None: as before (which its stubs do not know)."""
        nonlocal served
        if (current := identity.current()) is served:
            return None
        served = current
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=mutual)
