"""decant.v1.Inference over gRPC: the same requests as over HTTP, typed.

A value that is wrong ends the call with INVALID_ARGUMENT naming the field. A client that cancels closes its answer.

Must not know: HTTP, nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc.aio
from decant_proto.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from foundation.metrics import RouterMetrics
from router import grammar as grammars
from router.answer import WRITE_GRACE_S, AnswerStream, Piece, pieces_of
from router.dispatch import Dispatcher
from router.generation import (
    Generation,
    Refusal,
    RefusalKind,
    RequestRefused,
    SamplingWishes,
    checked_choices,
    invalid,
)
from router.grpc_errors import abort
from router.intake import LONG_TEXT_CHARACTERS, Intake
from router.request_trace import Caller, Operation

_FINISH = {"stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}

Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

CancelContext = grpc.aio.ServicerContext[inference_pb2.CancelRequest, inference_pb2.CancelResponse]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, intake: Intake, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._metrics = metrics

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        try:
            generations = await self._generations(request, context)
        except RequestRefused as refused:
            self._metrics.requests_refused_total.count("invalid")
            await abort(context, refused.refusal)
        streams: list[AnswerStream] = []
        try:
            for generation in generations:
                streams.append(self._dispatcher.open(generation, _caller(request, context)))  # noqa: PERF401  (those opened are closed if one is refused)
            async with asyncio.timeout(generations[0].deadline_s + WRITE_GRACE_S):
                await _write(context, streams)
        except RequestRefused as refused:
            await abort(context, refused.refusal)
        except TimeoutError:
            await abort(context, Refusal(RefusalKind.DEADLINE, "what was written has not been read", code="not_read"))
        finally:
            for stream in streams:
                stream.close()

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: CancelContext
    ) -> inference_pb2.CancelResponse:
        return inference_pb2.CancelResponse(found=self._dispatcher.cancel(request.request_id))

    async def _generations(self, request: inference_pb2.GenerateRequest, context: Context) -> list[Generation]:
        intake = self._intake
        choices = checked_choices(request.n if request.HasField("n") else None)
        intake.check_model(request.model or None)
        prompt = await self._prompt(request)
        remaining_s = context.time_remaining()
        wanted_s = request.timeout_ms / 1000 if request.timeout_ms else None
        limits_s = [limit for limit in (wanted_s, remaining_s) if limit is not None]
        timeout_s = max(0.001, min(limits_s)) if limits_s else None
        # A grammar takes long to check where it is long.
        is_long = request.ByteSize() >= LONG_TEXT_CHARACTERS
        wishes = await asyncio.to_thread(_wishes, request) if is_long else _wishes(request)
        return intake.generations([prompt], wishes, choices=choices, timeout_s=timeout_s)

    async def _prompt(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        match request.WhichOneof("input"):
            case "text":
                return await self._intake.prompt_from_text("text", request.text)
            case "token_ids":
                return self._intake.prompt_from_tokens("token_ids", request.token_ids.ids)
            case "chat":
                messages = [{"role": one.role, "content": one.content} for one in request.chat.messages]
                if not all(message["role"] for message in messages):
                    raise invalid("chat.messages.role", "chat.messages.role must not be empty")
                return await self._intake.prompt_from_chat(messages)
            case None:
                raise invalid("input", "one of text, token_ids and chat must be given", "missing_parameter")


def _caller(request: inference_pb2.GenerateRequest, context: Context) -> Caller:
    metadata = dict(context.invocation_metadata() or ())
    operation: Operation = "chat" if request.HasField("chat") else "text_completion"
    return Caller(operation, str(metadata.get("traceparent", "")))


def _wishes(request: inference_pb2.GenerateRequest) -> SamplingWishes:
    asked = request.sampling

    def given(name: str) -> bool:
        return asked.HasField(name)  # type: ignore[arg-type]

    return SamplingWishes(
        temperature=asked.temperature if given("temperature") else None,
        top_k=asked.top_k if given("top_k") else None,
        top_p=asked.top_p if given("top_p") else None,
        min_p=asked.min_p if given("min_p") else None,
        seed=asked.seed if given("seed") else None,
        max_tokens=asked.max_tokens if given("max_tokens") else None,
        min_tokens=asked.min_tokens if given("min_tokens") else None,
        ignore_eos=asked.ignore_eos if given("ignore_eos") else None,
        stop_token_ids=tuple(asked.stop_token_ids),
        stop=tuple(request.stop),
        logprobs=asked.logprobs if given("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if given("prompt_logprobs") else None,
        repetition_penalty=asked.repetition_penalty if given("repetition_penalty") else None,
        presence_penalty=asked.presence_penalty if given("presence_penalty") else None,
        frequency_penalty=asked.frequency_penalty if given("frequency_penalty") else None,
        logit_bias=dict(asked.logit_bias),
        allowed_token_ids=tuple(asked.allowed_token_ids),
        bad_words=tuple(asked.bad_words),
        include_stop=request.include_stop_str_in_output if request.HasField("include_stop_str_in_output") else None,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else None,
        grammar=_grammar(request),
    )


def _grammar(request: inference_pb2.GenerateRequest) -> str:
    match request.WhichOneof("constraint"):
        case "json_schema":
            return grammars.from_schema("json_schema", request.json_schema)
        case "regex":
            return grammars.from_regex("regex", request.regex)
        case "choice":
            return grammars.from_choice("choice.texts", request.choice.texts)
        case "grammar":
            return grammars.from_lark("grammar", request.grammar)
        case None:
            return ""


async def _write(context: Context, streams: Sequence[AnswerStream]) -> None:
    """All answers, whole. Waits where the client does not read."""
    await context.send_initial_metadata((("decant-request-id", streams[0].generation.request_id),))
    unsaid = streams[0].prompt_scores
    async with contextlib.aclosing(pieces_of(streams)) as pieces:
        async for index, piece in pieces:
            if piece.failure is not None:
                await abort(context, piece.failure)
            if unsaid is not None and index == 0:
                for run in unsaid.runs():
                    named = streams[0].generation.request_id
                    await context.write(inference_pb2.GenerateResponse(request_id=named, prompt_logprobs=run))
                unsaid = None
            await context.write(_response(index, streams[index], piece))


def _response(index: int, stream: AnswerStream, piece: Piece) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=stream.generation.request_id, text=piece.text, tokens=piece.tokens, index=index
    )
    if piece.finish_reason is not None:
        response.finish_reason = _FINISH[piece.finish_reason]
        response.usage.CopyFrom(
            inference_pb2.Usage(
                prompt_tokens=len(stream.generation.prompt),
                completion_tokens=stream.completion_tokens,
                cached_tokens=stream.cached_tokens or 0,
            )
        )
    return response
