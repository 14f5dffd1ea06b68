"""Who may ask this router for what: an API key, its scope, and what is open to everybody.

Both front ends present what the client sent as `Authorization`: `Bearer KEY`, or `Basic`, whose password is the key (a browser
asks for that by itself, for the live page).

Must not know: what a request asks for. Never logged or answered: what was presented.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from foundation.api_keys import ApiKeyStore, Scope
from foundation.log import bind

OPEN_PATHS = frozenset({"/live", "/health", "/metrics"})
"""Probes and scrapers carry no key. They name nodes and their addresses, and no request."""
ADMIN_PATHS = ("/waiting", "/ui")
OPEN_METHODS = "/grpc.health.v1.Health/"
NEEDED_SCOPES = (("/decant.v1.Admin/", Scope.ADMIN), ("/decant.v1.Registry/", Scope.NODE))

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

CHALLENGE = 'Bearer realm="decant"'
BROWSER_CHALLENGE = 'Basic realm="decant, password: an API key"'


@dataclass(frozen=True, slots=True)
class Denied:
    """`known`: the key is good, but not for this."""

    message: str
    code: str
    known: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` of the key, empty where none is asked for."""

    name: str = ""


class Access:
    """`denied` counts by code."""

    def __init__(self, keys: ApiKeyStore, denied: Callable[[str], None]) -> None:
        self._keys = keys
        self._denied = denied

    @property
    def required(self) -> bool:
        """Whether anybody must present a key at all."""
        return self._keys.required

    def to_path(self, path: str, authorization: str | None) -> Caller | Denied:
        if path in OPEN_PATHS:
            return Caller()
        admin = any(path == known or path.startswith(f"{known}/") for known in ADMIN_PATHS)
        return self._judge(authorization, Scope.ADMIN if admin else Scope.INFERENCE)

    def to_method(self, method: str, authorization: str | None) -> Caller | Denied:
        if method.startswith(OPEN_METHODS):
            return Caller()
        needed = next((scope for prefix, scope in NEEDED_SCOPES if method.startswith(prefix)), Scope.INFERENCE)
        return self._judge(authorization, needed)

    def _judge(self, authorization: str | None, needed: Scope) -> Caller | Denied:
        if not self._keys.required:
            return Caller()
        judged = self._look_up(authorization, needed)
        if isinstance(judged, Denied):
            self._denied(judged.code)
        return judged

    def _look_up(self, authorization: str | None, needed: Scope) -> Caller | Denied:
        if not authorization:
            return Denied("an API key is required: Authorization: Bearer KEY", "missing_api_key")
        presented = _presented(authorization)
        key = None if presented is None else self._keys.find(presented)
        if key is None:
            return Denied("this API key is not known here", "invalid_api_key")
        if not key.scope.covers(needed):
            return Denied(f"this needs an API key of scope {needed.value}", "insufficient_scope", known=True)
        return Caller(key.name)


def _presented(authorization: str) -> str | None:
    scheme, _, rest = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip()
        case "basic":
            try:
                return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no text in it
                return None
        case _:
            return None


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """The same on gRPC: UNAUTHENTICATED or PERMISSION_DENIED before a request is read."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        shown = dict(details.invocation_metadata or ()).get("authorization")
        judged = self._access.to_method(details.method, shown if isinstance(shown, str) else None)
        if isinstance(judged, Denied):
            return _denying(judged)
        if judged.name:
            bind(api_key=judged.name)
        return await continuation(details)


def _denying(denied: Denied) -> Handler:
    code = grpc.StatusCode.PERMISSION_DENIED if denied.known else grpc.StatusCode.UNAUTHENTICATED

    async def abort(_request: object, context: grpc.aio.ServicerContext[object, object]) -> object:
        trailing = (("decant-code", denied.code), ("decant-retryable", "false"))
        return await context.abort(code, denied.message, trailing)

    # What kind of method it is does not matter: the status is all that is answered.
    return grpc.unary_unary_rpc_method_handler(abort)
