"""What clients get: response objects, and stream chunks built from a template, since there is one for every token.

The forms are OpenAI's, with vLLM's `stop_reason`.

Must not know: where tokens come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decant_proto.v1 import types_pb2

from router.answer import AnswerStream, Piece

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

TokenText = Callable[[Sequence[int]], str]

_compact = json.JSONEncoder(separators=(",", ":")).encode
_encode_string = json.encoder.encode_basestring_ascii


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, streams: Sequence[AnswerStream]) -> Usage:
        """A prompt with several choices counts once."""
        firsts = [stream for stream in streams if stream.generation.choice_index == 0]
        return cls(
            sum(len(stream.generation.prompt) for stream in firsts),
            sum(stream.completion_tokens for stream in streams),
            sum(stream.cached_tokens or 0 for stream in firsts),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks and the response of one request share."""

    response_id: str
    created: int
    model: str

    def as_json(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Choice:
    """One choice as it grows."""

    index: int
    text_length: int = 0
    began: bool = False
    texts: list[str] = field(default_factory=list)
    tokens: list[types_pb2.Token] = field(default_factory=list)


class CompletionForm:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def response_choice(self, index: int, text: str, logprobs: Any, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def chunk_choice(self, index: int, text_json: str, logprobs_json: str, finish_json: str, first: bool) -> str:
        return f'{{"index":{index},"text":{text_json},"logprobs":{logprobs_json},{finish_json}}}'

    def logprobs(self, tokens: Sequence[types_pb2.Token], text_offset: int) -> dict[str, Any]:
        texts = [self._token_text([token.token_id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(text_offset)
            text_offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "tokens": texts,
            "top_logprobs": [self._best(token, text) for token, text in zip(tokens, texts, strict=True)],
        }

    def _best(self, token: types_pb2.Token, text: str) -> dict[str, float]:
        best = {self._token_text([one.token_id]): _finite(one.logprob) for one in token.top_logprobs}
        return {text: _finite(token.logprob), **best}


class ChatForm:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, token_text: TokenText, token_bytes: Callable[[int], list[int]]) -> None:
        self._token_text = token_text
        self._token_bytes = token_bytes

    def response_choice(self, index: int, text: str, logprobs: Any, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def chunk_choice(self, index: int, text_json: str, logprobs_json: str, finish_json: str, first: bool) -> str:
        role = '"role":"assistant",' if first else ""
        return f'{{"index":{index},"delta":{{{role}"content":{text_json}}},"logprobs":{logprobs_json},{finish_json}}}'

    def logprobs(self, tokens: Sequence[types_pb2.Token], text_offset: int) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._one(token.token_id, token.logprob),
                    "top_logprobs": [self._one(best.token_id, best.logprob) for best in token.top_logprobs],
                }
                for token in tokens
            ]
        }

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text([token_id]),
            "logprob": _finite(logprob),
            "bytes": self._token_bytes(token_id),
        }


Form = CompletionForm | ChatForm


class Answer:
    """The answer to one HTTP request: one or several choices, as one response or as a stream of chunks."""

    def __init__(
        self,
        form: Form,
        envelope: Envelope,
        streams: Sequence[AnswerStream],
        usage_key: bool = False,
        token_ids: bool = False,
        beginnings: Sequence[str] = (),
    ) -> None:
        """`usage_key`: chunks say `"usage": null` before the last one tells it. `token_ids`: each choice shows them beside
        its text, the prompt's too. `beginnings`: what each choice's text begins with, where prompts are echoed."""
        self._token_ids = token_ids
        self._form = form
        self._envelope = envelope
        self._streams = streams
        self._choices = [_Choice(index) for index in range(len(streams))]
        self._beginnings = beginnings or [""] * len(streams)
        head = _compact(envelope.as_json(form.chunk_object))
        self._chunk_head = f'data: {head[:-1]},"choices":['
        self._chunk_tail = '],"usage":null}\n\n' if usage_key else "]}\n\n"

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event for what is new in one choice; empty when there is nothing to show."""
        choice = self._choices[index]
        logprobs = "null"
        if piece.tokens and self._streams[index].generation.sampling.logprobs is not None:
            logprobs = _compact(self._form.logprobs(piece.tokens, choice.text_length))
        elif not piece.text and not piece.last and choice.began and not self._token_ids:
            return b""
        finish = '"finish_reason":null,"stop_reason":null'
        if piece.last:
            finish = f'"finish_reason":{json.dumps(piece.finish_reason)},"stop_reason":{json.dumps(piece.stop_reason)}'
        text = piece.text if choice.began else self._beginnings[index] + piece.text
        body = self._form.chunk_choice(index, _encode_string(text), logprobs, finish, not choice.began)
        if self._token_ids:
            body = body[:-1] + "," + _compact(self._ids(choice, piece.tokens, with_prompt=not choice.began))[1:]
        choice.began = True
        choice.text_length += len(piece.text)
        tail = self._chunk_tail if usage is None else f'],"usage":{_compact(usage.as_json())}}}\n\n'
        return f"{self._chunk_head}{body}{tail}".encode()

    def usage_chunk(self) -> bytes:
        body = {**self._envelope.as_json(self._form.chunk_object), "choices": [], "usage": self.usage().as_json()}
        return b"data: " + _compact(body).encode() + b"\n\n"

    def take(self, index: int, piece: Piece) -> None:
        """Keep a piece for the whole response."""
        choice = self._choices[index]
        choice.texts.append(piece.text)
        if self._token_ids or self._streams[index].generation.sampling.logprobs is not None:
            choice.tokens.extend(piece.tokens)

    def response(self, lasts: Sequence[Piece]) -> dict[str, Any]:
        """`lasts`: the last piece of each choice."""
        choices = []
        for choice, last in zip(self._choices, lasts, strict=True):
            wanted = self._streams[choice.index].generation.sampling.logprobs is not None
            logprobs = self._form.logprobs(choice.tokens, 0) if wanted else None
            text = "".join([self._beginnings[choice.index], *choice.texts])
            ids = self._ids(choice, choice.tokens, with_prompt=True) if self._token_ids else {}
            choices.append({**self._form.response_choice(choice.index, text, logprobs, last), **ids})
        return {
            **self._envelope.as_json(self._form.object),
            "choices": choices,
            "usage": self.usage().as_json(),
        }

    def _ids(self, choice: _Choice, tokens: Sequence[types_pb2.Token], *, with_prompt: bool) -> dict[str, Any]:
        ids = [token.token_id for token in tokens]
        prompt = self._streams[choice.index].generation.prompt
        return {"prompt_token_ids": prompt, "token_ids": ids} if with_prompt else {"token_ids": ids}

    def usage(self) -> Usage:
        return Usage.of(self._streams)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
