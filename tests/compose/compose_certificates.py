"""What an operator draws for a deployment under TLS: one folder with what docs/deployment.md asks for, and a client's own."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from certificates import SERVER_NAME, Authority

from decant.client import ApiError, AsyncClient, Tls
from foundation.api_keys import Scope, add_api_key

USER = 10001
"""Whoever the containers run as."""


class Certificates:
    """`folder` is TLS_FOLDER. `addresses`: under which clients reach routers.

    Clients and nodes have authorities of their own; the front's signs what routers show, what clients show, and the probe's.
    """

    def __init__(self, folder: Path, *addresses: str) -> None:
        self.folder = folder
        self.member = Authority(folder).issue("node")
        front = Authority(folder / "front")
        public, probe = front.issue("public", *addresses), front.issue("probe", "probe")
        self.client = front.issue("client", "client")
        for files in (public, probe):
            for path in (files.certificate, files.private_key):
                path.rename(folder / path.name)
        (folder / "clients.pem").write_bytes(front.file.read_bytes())
        self.front = front.file
        self.api_key = add_api_key(folder / "api-keys", "test", Scope.INFERENCE)
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)

    def tls(self, *, certificate: bool = True) -> Tls:
        """Of a client that shows its certificate, or none."""
        if not certificate:
            return Tls(ca_file=self.front)
        return Tls(ca_file=self.front, cert_file=self.client.certificate, key_file=self.client.private_key)

    def trust(self, *, certificate: bool = True) -> ssl.SSLContext:
        """The same for HTTPS."""
        context = ssl.create_default_context(cafile=str(self.front))
        if certificate:
            context.load_cert_chain(self.client.certificate, self.client.private_key)
        return context

    def channel(self, address: str) -> grpc.aio.Channel:
        """To a router, with everything that a client shows: each call carries the API key."""
        key = grpc.access_token_call_credentials(self.api_key)
        credentials = grpc.composite_channel_credentials(self.tls().credentials(), key)
        return grpc.aio.secure_channel(address, credentials, (("grpc.enable_http_proxy", 0),))

    def internal(self, *, certificate: bool) -> grpc.ChannelCredentials:
        """Of somebody who knows the nodes' authority; with a certificate, a member's."""
        authority, private_key, chain = (
            path.read_bytes() for path in (self.member.authority, self.member.private_key, self.member.certificate)
        )
        if not certificate:
            return grpc.ssl_channel_credentials(authority)
        return grpc.ssl_channel_credentials(authority, private_key, chain)


async def said_to(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """What a caller of an internal port hears who asks for a method that is not there. None: a caller in the clear."""
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0))
    opened = (
        grpc.aio.insecure_channel(address, options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    )
    async with opened as channel:
        ask: Any = channel.unary_unary("/decant.v1.Nothing/Nothing")
        try:
            await ask(b"", timeout=15)
        except grpc.aio.AioRpcError as error:
            return error.code()
        raise AssertionError(f"{address} answered a method that nobody has")


async def refusal_over_grpc(address: str, api_key: str | None, tls: Tls | None) -> grpc.StatusCode | None:
    """What a client hears; None when it is answered."""
    async with AsyncClient(address, api_key=api_key, tls=tls) as client:
        try:
            await client.complete("x", max_tokens=1)
        except ApiError as error:
            return error.status
        return None


def status_over_https(url: str, certificates: Certificates, *, certificate: bool) -> int:
    """Without an API key; 0 when nobody answers."""
    trust = certificates.trust(certificate=certificate)
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0
