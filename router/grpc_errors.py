"""Failures as gRPC clients know them: a status code, a sentence, trailing metadata for programs; and the root of every method.

Must not know: what a method does.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Never, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from foundation.log import get_logger
from router.generation import Refusal, RefusalKind
from router.wording import INTERNAL_ERROR

log = get_logger()

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

CODES = {
    RefusalKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    RefusalKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    RefusalKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalKind.CANCELLED: grpc.StatusCode.CANCELLED,
    RefusalKind.INTERNAL: grpc.StatusCode.INTERNAL,
}


async def abort(context: Context, refusal: Refusal) -> Never:
    named = refusal.parameter is not None and refusal.parameter not in refusal.message
    message = f"{refusal.parameter}: {refusal.message}" if named else refusal.message
    trailing = [("decant-code", refusal.code or ""), ("decant-retryable", str(refusal.retryable).lower())]
    await context.abort(CODES[refusal.kind], message, tuple(trailing))
    raise AssertionError("abort raises")


class MethodRoot(grpc.aio.ServerInterceptor):
    """Where no method knew what to do: a bug is INTERNAL, with its traceback in the log and nothing of it for the client; what
    cannot be read as a request is INVALID_ARGUMENT. (The library says UNKNOWN to both, and quotes the exception.)"""

    def __init__(self, malformed: Callable[[], None]) -> None:
        """`malformed` is told of each request that cannot be read."""
        self._malformed = malformed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        read, write = _reader(handler.request_deserializer), handler.response_serializer
        if inspect.iscoroutinefunction(handler.unary_unary):
            method = self._rooted(handler.unary_unary, details.method)
            return grpc.unary_unary_rpc_method_handler(method, read, write)
        if inspect.iscoroutinefunction(handler.unary_stream):
            method = self._rooted(handler.unary_stream, details.method)
            return grpc.unary_stream_rpc_method_handler(method, read, write)
        return handler  # of a library: health, reflection

    def _rooted(self, method: Method, name: str) -> Any:
        async def rooted(request: Any, context: Context) -> Any:
            if isinstance(request, _Malformed):
                self._malformed()
                await abort(context, Refusal(RefusalKind.INVALID, request.problem, code="malformed_request"))
            try:
                return await method(request, context)
            except Exception as error:
                if _is_the_librarys(error) or context.done():
                    raise
                log.exception("request failed inside the router", path=name)
                await abort(context, INTERNAL_ERROR)

        return rooted


def _is_the_librarys(error: Exception) -> bool:
    """Aborted, or beyond an answer: the call or the server has ended."""
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)


@dataclass(frozen=True, slots=True)
class _Malformed:
    problem: str


def _reader(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if read is None:
        return None  # a call that is refused before it is read

    def read_or_say_why(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError:
            return _Malformed("the request is not a message of the type that this method takes")

    return read_or_say_why
