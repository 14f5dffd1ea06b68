"""What clients get: response objects, and stream chunks built from a template, since there is one for every token.

The forms are OpenAI's, with vLLM's `stop_reason`.

Must not know: where tokens come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decant_proto.v1 import types_pb2

from router.answer import AnswerStream, Piece
from router.openai.prompt_logprobs import TokenText, finite
from router.tool_calls import CallDelta, Parsed, ToolCallParser

DONE = b"data: [DONE]\n\n"
MANY_TOKENS = 128
"""What stands in a response for each of so many tokens takes tens of milliseconds to write, with 20 of the best for each."""
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
    parser: ToolCallParser | None = None
    """Of an answer that may call tools."""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def read(self, piece: Piece) -> Parsed:
        if self.parser is None:
            return Parsed(piece.text)
        parsed = self.parser.add(piece.text)
        if piece.last:
            rest = self.parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        for delta in parsed.calls:
            self._join(delta)
        return parsed

    def _join(self, delta: CallDelta) -> None:
        if delta.name is not None:
            call = delta.as_json()
            del call["index"]
            self.calls.append(call)
        else:
            self.calls[-1]["function"]["arguments"] += delta.arguments


class CompletionForm:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_ids_in_choice = True
    """As in vLLM: each choice shows its own prompt's, for there may be several."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def response_choice(self, choice: _Choice, text: str, logprobs: Any, ending: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, **ending}

    def chunk_choice(self, index: int, parsed: Parsed, logprobs_json: str, finish_json: str, first: bool) -> str:
        text_json = _encode_string(parsed.content)
        return f'{{"index":{index},"text":{text_json},"logprobs":{logprobs_json},{finish_json}}}'

    def logprobs(self, tokens: Sequence[types_pb2.Token], text_offset: int, token_text: TokenText) -> dict[str, Any]:
        """`token_text`: how a token is named; offsets are those of its real text."""
        texts = [self._token_text([token.token_id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(text_offset)
            text_offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "tokens": [token_text([token.token_id]) for token in tokens],
            "top_logprobs": [_best(token, token_text) for token in tokens],
        }


class ChatForm:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_ids_in_choice = False

    def __init__(self, token_bytes: Callable[[int], list[int]]) -> None:
        self._token_bytes = token_bytes

    def response_choice(self, choice: _Choice, text: str, logprobs: Any, ending: Mapping[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message = {**message, "content": text if text.strip() else None, "tool_calls": choice.calls}
        return {"index": choice.index, "message": message, "logprobs": logprobs, **ending}

    def chunk_choice(self, index: int, parsed: Parsed, logprobs_json: str, finish_json: str, first: bool) -> str:
        role = '"role":"assistant",' if first else ""
        delta = f'{role}"content":{_encode_string(parsed.content)}'
        if parsed.calls:
            content = f'"content":{_encode_string(parsed.content)},' if parsed.content else ""
            delta = f'{role}{content}"tool_calls":{_compact([call.as_json() for call in parsed.calls])}'
        return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs_json},{finish_json}}}'

    def logprobs(self, tokens: Sequence[types_pb2.Token], text_offset: int, token_text: TokenText) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._one(token.token_id, token.logprob, token_text),
                    "top_logprobs": [self._one(best.token_id, best.logprob, token_text) for best in token.top_logprobs],
                }
                for token in tokens
            ]
        }

    def _one(self, token_id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
        return {
            "token": token_text([token_id]),
            "logprob": finite(logprob),
            "bytes": self._token_bytes(token_id),
        }


Form = CompletionForm | ChatForm


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants to read beside the text."""

    token_text: TokenText
    """How tokens are named in log probabilities."""
    usage_key: bool = False
    """Chunks say `"usage": null` before the last one tells it."""
    token_ids: bool = False
    """Each choice shows them beside its text; the prompt's stand where vLLM has them."""
    prompt_logprobs: Callable[[AnswerStream], Any] | None = None
    """Those of the prompt of this choice, which is its prompt's first, as they stand beside the answer."""
    echoed: Callable[[AnswerStream, str], dict[str, list[Any]]] | None = None
    """The same as the beginning of the answer's own, for a prompt that is written like this."""
    prompt_alone: bool = False
    """Nothing of the answer is shown, only the prompt."""
    parser: Callable[[], ToolCallParser] | None = None
    """Of answers that may call tools."""
    names_its_tool: bool = False
    """The one call was asked for by name: then the answer ends as others do (OpenAI's rule)."""


class Answer:
    """The answer to one HTTP request: one or several choices, as one response or as a stream of chunks."""

    def __init__(
        self,
        form: Form,
        envelope: Envelope,
        streams: Sequence[AnswerStream],
        wanted: Wanted,
        beginnings: Sequence[str] = (),
    ) -> None:
        """`beginnings`: what each choice's text begins with, where prompts are echoed."""
        self._form = form
        self._envelope = envelope
        self._streams = streams
        self._wanted = wanted
        self._beginnings = beginnings or [""] * len(streams)
        self._choices = [
            _Choice(index, len(self._beginnings[index]), parser=wanted.parser() if wanted.parser else None)
            for index in range(len(streams))
        ]
        head = _compact(envelope.as_json(form.chunk_object))
        self._chunk_head = f'data: {head[:-1]},"choices":['
        self._chunk_tail = '],"usage":null}\n\n' if wanted.usage_key else "]}\n\n"

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event for what is new in one choice; empty when there is nothing to show."""
        if self._wanted.prompt_alone:
            piece = _without_answer(piece)
        choice = self._choices[index]
        parsed = choice.read(piece)
        logprobs = "null"
        if self._wants_logprobs(index) and (piece.tokens or (self._wanted.echoed and not choice.began)):
            logprobs = _compact(self._logprobs(choice, piece.tokens))
        elif not (parsed.content or parsed.calls or piece.last or self._wanted.token_ids) and choice.began:
            return b""
        finish = '"finish_reason":null,"stop_reason":null'
        if piece.last:
            finish = _compact(self._ending(choice, piece))[1:-1]
        if not choice.began and self._beginnings[index]:
            parsed = Parsed(self._beginnings[index] + parsed.content)
        begins = not choice.began
        body = self._form.chunk_choice(index, parsed, logprobs, finish, begins)
        if self._wanted.token_ids:
            body = body[:-1] + "," + _compact(self._ids(choice, piece.tokens, with_prompt=begins))[1:]
        choice.began = True
        choice.text_length += len(piece.text)
        tail = self._chunk_tail if usage is None else f'],"usage":{_compact(usage.as_json())}}}\n\n'
        if beside := self._prompt_ids_beside() if begins else {}:
            tail = f"],{_compact(beside)[1:-1]}{tail[1:]}"
        return f"{self._chunk_head}{body}{tail}".encode()

    def usage_chunk(self) -> bytes:
        body = {**self._envelope.as_json(self._form.chunk_object), "choices": [], "usage": self.usage().as_json()}
        return b"data: " + _compact(body).encode() + b"\n\n"

    def take(self, index: int, piece: Piece) -> None:
        """Keep a piece for the whole response."""
        if self._wanted.prompt_alone:
            piece = _without_answer(piece)
        choice = self._choices[index]
        choice.texts.append(choice.read(piece).content)
        if self._wanted.token_ids or self._wants_logprobs(index):
            choice.tokens.extend(piece.tokens)

    def response(self, lasts: Sequence[Piece]) -> dict[str, Any]:
        """For `writing`: choices are made as they are asked for. `lasts`: the last piece of each of them."""
        return {
            **self._envelope.as_json(self._form.object),
            "choices": map(self._whole_choice, self._choices, lasts),
            "usage": self.usage().as_json(),
            **self._prompt_ids_beside(),
            **self._prompt_logprobs(0, in_choice=False),
        }

    def _whole_choice(self, choice: _Choice, last: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(choice, choice.tokens) if self._wants_logprobs(choice.index) else None
        text = "".join([self._beginnings[choice.index], *choice.texts])
        ids = self._ids(choice, choice.tokens, with_prompt=True) if self._wanted.token_ids else {}
        shown = self._form.response_choice(choice, text, logprobs, self._ending(choice, last))
        return {**shown, **ids, **self._prompt_logprobs(choice.index, in_choice=True)}

    def _logprobs(self, choice: _Choice, tokens: Sequence[types_pb2.Token]) -> dict[str, Any]:
        """Of these tokens, and before the first of them of a prompt that is echoed."""
        found = self._form.logprobs(tokens, choice.text_length, self._wanted.token_text)
        if self._wanted.echoed is None or choice.began:
            return found
        before = self._wanted.echoed(self._first_of_prompt(choice.index), self._beginnings[choice.index])
        return {name: before[name] + found[name] for name in before}

    def _prompt_logprobs(self, index: int, *, in_choice: bool) -> dict[str, Any]:
        """As in vLLM they stand where the prompt's token ids do."""
        if self._wanted.prompt_logprobs is None or in_choice is not self._form.prompt_ids_in_choice:
            return {}
        return {"prompt_logprobs": self._wanted.prompt_logprobs(self._first_of_prompt(index))}

    def _first_of_prompt(self, index: int) -> AnswerStream:
        """The first choice of the same prompt, which knows of the prompt."""
        return self._streams[index - self._streams[index].generation.choice_index]

    @property
    def takes_long(self) -> bool:
        """Whether something stands in the whole response for each token of a prompt, or for very many of the answer's."""
        tells_of_prompt = self._wanted.prompt_logprobs is not None or self._wanted.echoed is not None
        return tells_of_prompt or sum(len(choice.tokens) for choice in self._choices) >= MANY_TOKENS

    def _ending(self, choice: _Choice, last: Piece) -> dict[str, Any]:
        called = bool(choice.calls) and not self._wanted.names_its_tool and last.finish_reason == "stop"
        return {"finish_reason": "tool_calls" if called else last.finish_reason, "stop_reason": last.stop_reason}

    def _ids(self, choice: _Choice, tokens: Sequence[types_pb2.Token], *, with_prompt: bool) -> dict[str, Any]:
        ids = {"token_ids": [token.token_id for token in tokens]}
        if with_prompt and self._form.prompt_ids_in_choice:
            return {"prompt_token_ids": self._streams[choice.index].generation.prompt, **ids}
        return ids

    def _prompt_ids_beside(self) -> dict[str, Any]:
        """What stands beside the choices, which share one prompt."""
        if not self._wanted.token_ids or self._form.prompt_ids_in_choice:
            return {}
        return {"prompt_token_ids": self._streams[0].generation.prompt}

    def _wants_logprobs(self, index: int) -> bool:
        return self._streams[index].generation.sampling.logprobs is not None

    def usage(self) -> Usage:
        usage = Usage.of(self._streams)
        return replace(usage, completion_tokens=0) if self._wanted.prompt_alone else usage


def _without_answer(piece: Piece) -> Piece:
    finish_reason = "length" if piece.finish_reason is not None else None
    return replace(piece, text="", tokens=(), finish_reason=finish_reason, stop_reason=None)


def token_id_text(token_ids: Sequence[int]) -> str:
    """vLLM's name of a token whose text is not wanted."""
    return "".join(f"token_id:{token_id}" for token_id in token_ids)


def _best(token: types_pb2.Token, token_text: TokenText) -> dict[str, float]:
    best = {token_text([one.token_id]): finite(one.logprob) for one in token.top_logprobs}
    return {token_text([token.token_id]): finite(token.logprob), **best}
