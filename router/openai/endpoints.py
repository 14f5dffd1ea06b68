"""/v1/completions and /v1/chat/completions: read, check, open, answer whole or as server-sent events.

A failure before the first byte is an HTTP status; after it, an error event in the stream, which then ends without [DONE]. A
client that leaves cancels the handler, and that closes its streams.

Must not know: nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web

from foundation.log import get_logger
from router.answer import WRITE_GRACE_S, AnswerStream, Piece, pieces_of
from router.dispatch import Dispatcher
from router.generation import MOST_CHOICES, Generation, Refusal, SamplingWishes, invalid
from router.intake import LONG_TEXT_CHARACTERS, Intake
from router.openai.answers import (
    DONE,
    Answer,
    ChatForm,
    CompletionForm,
    Envelope,
    Form,
    Wanted,
    token_id_text,
)
from router.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    template_variables,
)
from router.openai.errors import error_event, error_response
from router.openai.event_writer import push_rest
from router.openai.prompt_logprobs import beside_choice, echoed
from router.openai.reading import BodyT, read_body
from router.openai.writing import written, written_in_slices
from router.request_trace import Caller, Operation
from router.tool_calls import FORCED_PARSERS, PARSERS
from router.wording import INTERNAL_ERROR

log = get_logger()

COMPLETION_DEFAULT_MAX_TOKENS = 16
LONGEST_CORRELATION_ID = 128

_OPERATIONS: dict[type[Form], Operation] = {CompletionForm: "text_completion", ChatForm: "chat"}
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Endpoints:
    def __init__(self, intake: Intake, dispatcher: Dispatcher) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._completion_form = CompletionForm(intake.text.token_text)
        self._chat_form = ChatForm(intake.text.token_bytes)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        intake = self._intake
        body = await _read(CompletionBody, request)
        intake.check_model(body.model)
        found, choices = body.prompts(), body.choices()
        if len(found) * choices > MOST_CHOICES:
            raise invalid(
                "n", f"one request may ask for at most {MOST_CHOICES} answers, not {len(found)} times {choices}"
            )
        special_tokens = body.add_special_tokens is not False
        cut = intake.cut(body.truncate_prompt_tokens, body.truncation_side, body.max_tokens)
        texts = [prompt for prompt in found if isinstance(prompt, str)]  # all of them, or none
        prompts = await intake.prompts_from_texts("prompt", texts, special_tokens=special_tokens, cut=cut)
        prompts += [intake.prompt_from_tokens("prompt", cut(prompt)) for prompt in found if not isinstance(prompt, str)]
        generations = intake.generations(
            prompts,
            await _wishes(body, request),
            choices=choices,
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
            correlation_id=correlation_id(request),
        )
        beginnings: Sequence[str] = ()
        if body.echo:
            whole = body.truncate_prompt_tokens is None
            echoes = texts if texts and whole else await self._texts_of(prompts)
            beginnings = [text for text in echoes for _ in range(choices)]
        return await self._answer(request, self._completion_form, body, generations, beginnings)

    async def _texts_of(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        def texts() -> list[str]:
            return [self._intake.text.decode_all(prompt) for prompt in prompts]

        return texts() if sum(map(len, prompts)) < LONG_TEXT_CHARACTERS else await asyncio.to_thread(texts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        intake = self._intake
        body = await _read(ChatBody, request)
        intake.check_model(body.model)
        wishes = await _wishes(body, request)
        prompt = await intake.prompt_from_chat(
            [message.for_template(f"messages[{index}]") for index, message in enumerate(body.messages)],
            body.template_variables(),
            continued=bool(body.continue_final_message),
            special_tokens=bool(body.add_special_tokens),
            cut=intake.cut(body.truncate_prompt_tokens, body.truncation_side, wishes.max_tokens),
        )
        generations = intake.generations(
            [prompt], wishes, choices=body.choices(), correlation_id=correlation_id(request)
        )
        return await self._answer(request, self._chat_form, body, generations)

    async def tokenize(self, request: web.Request) -> web.Response:
        # Asked here, for it looks at the nodes, which change.
        context_limit = self._intake.context_limit()
        return await _at_leisure(await request.read(), partial(self._tokenized, context_limit))

    async def detokenize(self, request: web.Request) -> web.Response:
        return await _at_leisure(await request.read(), self._detokenized)

    def _tokenized(self, context_limit: int, raw: bytes) -> dict[str, Any]:
        intake = self._intake
        body = read_body(TokenizeBody, raw)
        intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(body.messages)]
            text = intake.chat_text(messages, template_variables(body), continued=bool(body.continue_final_message))
            tokens = intake.tokens("messages", text, special_tokens=bool(body.add_special_tokens))
        else:
            special_tokens = body.add_special_tokens is not False
            tokens = intake.tokens("prompt", body.prompt or "", special_tokens=special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": context_limit,
            "tokens": tokens,
            "token_strs": intake.text.symbols(tokens) if body.return_token_strs else None,
        }

    def _detokenized(self, raw: bytes) -> dict[str, Any]:
        body = read_body(DetokenizeBody, raw)
        self._intake.check_model(body.model)
        text = self._intake.text
        if not all(0 <= token < text.vocabulary_size for token in body.tokens):
            raise invalid("tokens", f"tokens must lie between 0 and {text.vocabulary_size - 1}")
        return {"prompt": text.decode_all(body.tokens)}

    async def _answer(
        self,
        request: web.Request,
        form: Form,
        body: CompletionBody | ChatBody,
        generations: Sequence[Generation],
        beginnings: Sequence[str] = (),
    ) -> web.StreamResponse:
        as_stream = body.streams()
        envelope = Envelope(form.id_prefix + generations[0].request_id, int(time.time()), self._intake.model_name)
        caller = Caller(_OPERATIONS[type(form)], request.headers.get("traceparent", ""))
        streams: list[AnswerStream] = []
        try:
            for generation in generations:
                streams.append(self._dispatcher.open(generation, caller))  # noqa: PERF401  (those opened are closed if one is refused)
            answer = Answer(form, envelope, streams, self._wanted(body), beginnings)
            async with asyncio.timeout(generations[0].deadline_s + WRITE_GRACE_S):
                if as_stream:
                    return await _stream(request, answer, streams, body)
                return await _whole(answer, streams)
        finally:
            for stream in streams:
                stream.close()

    def _wanted(self, body: CompletionBody | ChatBody) -> Wanted:
        parser, names_its_tool = None, False
        if isinstance(body, ChatBody) and body.calls_tools():
            parser, names_its_tool = (
                partial(
                    (FORCED_PARSERS if body.forces_call else PARSERS)[self._intake.tool_call_parser], body.most_calls
                ),
                body.names_its_tool,
            )
        text = self._intake.text
        token_text = token_id_text if body.return_tokens_as_token_ids else text.decode_all
        completion = body if isinstance(body, CompletionBody) else None
        echoes = completion.logprobs if completion is not None and completion.echoes_logprobs else None
        return Wanted(
            token_text=token_text,
            prompt_logprobs=None
            if body.prompt_logprobs is None
            else partial(beside_choice, text, body.prompt_logprobs),
            echoed=None if echoes is None else partial(echoed, text, token_text, echoes),
            prompt_alone=completion is not None and completion.prompt_alone,
            usage_key=body.usage_in_stream,
            token_ids=bool(body.return_token_ids),
            parser=parser,
            names_its_tool=names_its_tool,
        )


async def _read(kind: type[BodyT], request: web.Request) -> BodyT:
    """Raises RequestRefused."""
    raw = await request.read()
    return await asyncio.to_thread(read_body, kind, raw) if len(raw) >= LONG_TEXT_CHARACTERS else read_body(kind, raw)


async def _wishes(body: CompletionBody | ChatBody, request: web.Request) -> SamplingWishes:
    """Raises RequestRefused. A grammar takes long to check where it is long."""
    is_long = len(await request.read()) >= LONG_TEXT_CHARACTERS
    return await asyncio.to_thread(body.wishes) if is_long else body.wishes()


async def _at_leisure(raw: bytes, answer: Callable[[bytes], dict[str, Any]]) -> web.Response:
    """What a body asks for; of a long one wholly in a thread, so that other requests' tokens do not wait for it."""

    def body() -> bytes:
        return json.dumps(answer(raw)).encode()

    written = await asyncio.to_thread(body) if len(raw) >= LONG_TEXT_CHARACTERS else body()
    return web.Response(body=written, content_type="application/json", charset="utf-8")


def correlation_id(request: web.Request) -> str:
    """The client's x-request-id for logs and its own response; it names nothing here."""
    given = request.headers.get("X-Request-Id", "")
    return given[:LONGEST_CORRELATION_ID] if given.isascii() and given.isprintable() else ""


async def _whole(answer: Answer, streams: Sequence[AnswerStream]) -> web.Response:
    lasts: dict[int, Piece] = {}
    async with contextlib.aclosing(pieces_of(streams)) as pieces:
        async for index, piece in pieces:
            if piece.failure is not None:
                return error_response(piece.failure)
            answer.take(index, piece)
            if piece.last:
                lasts[index] = piece

    def write(encode: Callable[[Any], bytes]) -> bytes:
        return encode(answer.response([lasts[index] for index in range(len(streams))]))

    # Other requests' tokens would wait for a long one.
    body = await asyncio.to_thread(write, written_in_slices) if answer.takes_long else write(written)
    return web.Response(body=body, content_type="application/json")


async def _stream(
    request: web.Request, answer: Answer, streams: Sequence[AnswerStream], body: CompletionBody | ChatBody
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    if request.version < HttpVersion11:
        response.force_close()  # without chunks only the end of the connection says that the answer has ended
    try:
        return await _write_stream(request, response, answer, streams, body)
    except (ConnectionError, TimeoutError):
        raise
    except Exception:
        if not response.prepared:
            raise  # an error body can still be the answer
        log.exception("request failed inside the router", path=request.path)
        return await _end_with_error(response, INTERNAL_ERROR)


async def _write_stream(
    request: web.Request,
    response: web.StreamResponse,
    answer: Answer,
    streams: Sequence[AnswerStream],
    body: CompletionBody | ChatBody,
) -> web.StreamResponse:
    async with contextlib.aclosing(pieces_of(streams)) as pieces:
        async for index, piece in pieces:
            if piece.failure is not None:
                if not response.prepared:
                    return error_response(piece.failure)
                return await _end_with_error(response, piece.failure)
            chunk = answer.chunk(index, piece, answer.usage() if body.usage_in_every_chunk else None)
            if chunk:
                if response.prepared:
                    await response.write(chunk)
                    continue
                await response.prepare(request)
                await response.write(chunk)
                push_rest(request, answer, streams, usage=body.usage_in_every_chunk)
    if body.usage_in_stream:
        await response.write(answer.usage_chunk())
    await response.write(DONE)
    await response.write_eof()
    return response


async def _end_with_error(response: web.StreamResponse, failure: Refusal) -> web.StreamResponse:
    await response.write(error_event(failure))
    await response.write_eof()
    return response
