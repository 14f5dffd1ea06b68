"""A typed client of a router's gRPC API, sync (`Client`) and async (`AsyncClient`): the same methods, the same results.

    with Client("127.0.0.1:9000", api_key=key) as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="")

A prompt is a text, token ids, or a chat (`[("user", "Hello")]`). What goes wrong is an `ApiError` with the router's code and
whether the same request may succeed later. Leaving a `generate` early cancels the request; so does `cancel` from elsewhere.

Must not know: router, engine, torch; only the wire contract.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
import grpc.aio
from decant_proto.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

Chat = Sequence[tuple[str, str]]
"""(role, content) pairs."""
Prompt = str | Sequence[int] | Chat

ReplyT = TypeVar("ReplyT")

_OPTIONS = frozenset(field.name for field in inference_pb2.SamplingOptions.DESCRIPTOR.fields)
_FINISH = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


class Sampling(TypedDict, total=False):
    """Everything optional: what is not given takes the server's default. Names and ranges are those of the OpenAI API."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    json_schema: Mapping[str, Any] | str
    """The answer follows it; so with `regex`, `choice` and `grammar` (Lark), of which one may be given."""
    regex: str
    choice: Sequence[str]
    grammar: str


class ApiError(Exception):
    """The router refused or could not finish a request."""

    def __init__(self, status: grpc.StatusCode, message: str, code: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """A name for programs, such as `overloaded` or `invalid_value`; empty when no router answered."""
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new since the last piece; the last one of each answer carries `finish_reason` and its own `usage`."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    index: int = 0
    """Which of the `n` answers."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[float, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Tls:
    """How a router with --ssl-certfile is trusted. `ca_file`: the authority of its certificate (None: those that gRPC brings);
    `cert_file` and `key_file`: what a router with --ssl-ca-certs asks for, all in PEM. `server_name`: the name in its
    certificate, if that is not the address."""

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError."""
        files = (self.ca_file, self.key_file, self.cert_file)
        return grpc.ssl_channel_credentials(*(None if file is None else Path(file).read_bytes() for file in files))

    def options(self) -> list[tuple[str, str]]:
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


class Client:
    """Blocking. One connection, any number of requests at once from any number of threads."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """`address`: host:port of a router's --grpc-port. Raises OSError when a file of `tls` cannot be read."""
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=tls.options())
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> Iterator[Piece]:
        """Pieces of `n` answers as they come. Raises ApiError."""
        asked = _request(prompt, n, stop, timeout_s, model, sampling)
        call = self._inference.Generate(asked, metadata=self._metadata)
        try:
            for response in call:
                yield _piece(response)
        except grpc.RpcError as error:
            raise _api_error(error) from None
        finally:
            call.cancel()

    def complete(
        self,
        prompt: Prompt,
        *,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole answer. Raises ApiError."""
        (answer,) = self.choices(prompt, 1, stop=stop, timeout_s=timeout_s, model=model, **sampling)
        return answer

    def choices(
        self,
        prompt: Prompt,
        n: int,
        *,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """`n` whole answers to one prompt, which is computed once. Raises ApiError."""
        return _joined(self.generate(prompt, n=n, stop=stop, timeout_s=timeout_s, model=model, **sampling))

    def cancel(self, request_id: str) -> bool:
        """False when it had ended already."""
        return self._ask(self._inference.Cancel, inference_pb2.CancelRequest(request_id=request_id)).found

    def nodes(self) -> list[admin_pb2.NodeView]:
        return list(self._ask(self._admin.Nodes, admin_pb2.NodesRequest()).nodes)

    def requests(self, request_id: str = "", *, waiting: bool = False) -> list[admin_pb2.RequestView]:
        """Requests in flight: all, one by its id, or those without a first token."""
        asked = admin_pb2.RequestsRequest(request_id=request_id, waiting=waiting)
        return list(self._ask(self._admin.Requests, asked).requests)

    def drain(self, node_id: str, *, resume: bool = False) -> int:
        """No new work for the node from this router (or work again); requests that still run there."""
        return self._ask(self._admin.Drain, admin_pb2.DrainRequest(node_id=node_id, resume=resume)).attempts

    def _ask(self, method: Callable[..., ReplyT], request: object) -> ReplyT:
        try:
            return method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _api_error(error) from None


class AsyncClient:
    """`Client` on asyncio. Use it within one event loop."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=tls.options())
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncIterator[Piece]:
        """Pieces of `n` answers as they come. Raises ApiError."""
        asked = _request(prompt, n, stop, timeout_s, model, sampling)
        call = self._inference.Generate(asked, metadata=self._metadata)
        try:
            async for response in call:
                yield _piece(response)
        except grpc.aio.AioRpcError as error:
            raise _api_error(error) from None
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Prompt,
        *,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole answer. Raises ApiError."""
        (answer,) = await self.choices(prompt, 1, stop=stop, timeout_s=timeout_s, model=model, **sampling)
        return answer

    async def choices(
        self,
        prompt: Prompt,
        n: int,
        *,
        stop: Sequence[str] = (),
        timeout_s: float | None = None,
        model: str = "",
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """`n` whole answers to one prompt, which is computed once. Raises ApiError."""
        pieces = self.generate(prompt, n=n, stop=stop, timeout_s=timeout_s, model=model, **sampling)
        return _joined([piece async for piece in pieces])

    async def cancel(self, request_id: str) -> bool:
        """False when it had ended already."""
        return (await self._ask(self._inference.Cancel, inference_pb2.CancelRequest(request_id=request_id))).found

    async def nodes(self) -> list[admin_pb2.NodeView]:
        return list((await self._ask(self._admin.Nodes, admin_pb2.NodesRequest())).nodes)

    async def requests(self, request_id: str = "", *, waiting: bool = False) -> list[admin_pb2.RequestView]:
        """Requests in flight: all, one by its id, or those without a first token."""
        asked = admin_pb2.RequestsRequest(request_id=request_id, waiting=waiting)
        return list((await self._ask(self._admin.Requests, asked)).requests)

    async def drain(self, node_id: str, *, resume: bool = False) -> int:
        """No new work for the node from this router (or work again); requests that still run there."""
        return (await self._ask(self._admin.Drain, admin_pb2.DrainRequest(node_id=node_id, resume=resume))).attempts

    async def _ask(self, method: Callable[..., Awaitable[ReplyT]], request: object) -> ReplyT:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _api_error(error) from None


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _request(
    prompt: Prompt, n: int, stop: Sequence[str], timeout_s: float | None, model: str, sampling: Sampling
) -> inference_pb2.GenerateRequest:
    asked: dict[str, Any] = dict(sampling)
    if isinstance(schema := asked.get("json_schema"), Mapping):
        asked["json_schema"] = json.dumps(schema)
    if "choice" in asked:
        asked["choice"] = inference_pb2.Choices(texts=asked["choice"])
    options = inference_pb2.SamplingOptions(**{name: asked.pop(name) for name in _OPTIONS & asked.keys()})
    request = inference_pb2.GenerateRequest(
        model=model,
        stop=stop,
        timeout_ms=0 if timeout_s is None else max(1, round(timeout_s * 1000)),
        n=n,
        sampling=options,
        **asked,
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], tuple):
        messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in prompt]  # type: ignore[misc]
        request.chat.CopyFrom(inference_pb2.ChatMessages(messages=messages))
    else:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def _piece(response: inference_pb2.GenerateResponse) -> Piece:
    usage = response.usage
    return Piece(
        response.request_id,
        response.text,
        tuple(token.token_id for token in response.tokens),
        tuple(token.logprob for token in response.tokens if token.HasField("logprob")),
        _FINISH.get(response.finish_reason),
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if response.HasField("usage")
        else None,
        response.index,
    )


def _joined(pieces: Iterable[Piece]) -> list[Completion]:
    """Each answer, in order."""
    answers: dict[int, list[Piece]] = {}
    for piece in pieces:
        answers.setdefault(piece.index, []).append(piece)
    return [_completion(answers[index]) for index in sorted(answers)]


def _completion(pieces: Sequence[Piece]) -> Completion:
    last = pieces[-1]
    assert last.finish_reason is not None, "a stream that ends in order says why"
    assert last.usage is not None
    return Completion(
        last.request_id,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        last.finish_reason,
        last.usage,
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
    )


def _api_error(error: Any) -> ApiError:
    """`error`: of grpc or grpc.aio; what they share has no common type."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    retryable = trailing.get("decant-retryable", str(error.code() is grpc.StatusCode.UNAVAILABLE).lower()) == "true"
    return ApiError(
        error.code(), error.details() or error.code().name, trailing.get("decant-code", ""), retryable=retryable
    )
