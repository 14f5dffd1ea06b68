"""Request bodies: which fields there are, their types, and which of vLLM's fields are not offered.

Nothing is silently ignored: a field that is unknown is refused by name, and so is one that other servers know and this one does
not, unless it has the value that changes nothing. Ranges are checked where both front ends share them (`router.generation`).

Must not know: tokenizers, nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router import grammar as grammars
from router.generation import RequestRefused, SamplingWishes, invalid

MOST_MESSAGES = 4096
MOST_PROMPTS = 128
MOST_CHOICES = 128
LONGEST_TOKEN_ID = 10

_OFF: tuple[Any, ...] = (None, False, 0, [], {})
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "length_penalty": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "use_beam_search": _OFF,
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "return_tokens_as_token_ids": _OFF,
    "cache_salt": (None,),
    "priority": _OFF,
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
    "request_id": (None,),
}
"""Fields of vLLM's and OpenAI's APIs that are not offered here, with the values under which they ask for nothing."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    """vLLM's."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class _Generating(_Body):
    """What both kinds of completion have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def choices(self) -> int:
        """Raises RequestRefused."""
        choices = 1 if self.n is None else self.n
        if not 1 <= choices <= MOST_CHOICES:
            raise invalid("n", f"n must be between 1 and {MOST_CHOICES}, not {choices}")
        return choices

    def streams(self) -> bool:
        """Raises RequestRefused when there are options for a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options may only be given when stream is true")
        return bool(self.stream)

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.usage_in_stream and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _grammar(self) -> str:
        """Empty when the answer is free. Raises RequestRefused for a wrong grammar, and for more than one."""
        asked = self.structured_outputs or StructuredOutputs(json=None)
        wanted: dict[str, Callable[[str], str]] = {}
        for name, schema in (("guided_json", self.guided_json), ("structured_outputs.json", asked.json_)):
            if schema is not None:
                wanted[name] = partial(grammars.from_schema, schema=schema)
        for name, regex in (("guided_regex", self.guided_regex), ("structured_outputs.regex", asked.regex)):
            if regex is not None:
                wanted[name] = partial(grammars.from_regex, regex=regex)
        for name, choices in (("guided_choice", self.guided_choice), ("structured_outputs.choice", asked.choice)):
            if choices is not None:
                wanted[name] = partial(grammars.from_choice, choices=choices)
        for name, grammar in (("guided_grammar", self.guided_grammar), ("structured_outputs.grammar", asked.grammar)):
            if grammar is not None:
                wanted[name] = partial(grammars.from_lark, grammar=grammar)
        if asked.json_object:
            wanted["structured_outputs.json_object"] = grammars.any_object
        if self.response_format is not None and self.response_format.type != "text":
            wanted["response_format"] = self._format_grammar
        if len(wanted) > 1:
            first, second, *_ = wanted
            raise invalid(second, f"{second} and {first} may not both be given")
        return next((make(name) for name, make in wanted.items()), "")

    def _format_grammar(self, parameter: str) -> str:
        assert self.response_format is not None
        if self.response_format.type == "json_object":
            return grammars.any_object(parameter)
        asked = self.response_format.json_schema
        if asked is None or asked.schema_ is None:
            missing = "response_format.json_schema.schema"
            raise invalid(missing, f"{missing} is required", "missing_parameter")
        return grammars.from_schema(parameter, asked.schema_)

    def _stops(self) -> Sequence[str]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(_Generating):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    def echoes(self) -> bool:
        """Raises RequestRefused where the prompt's own log probabilities would be needed, which are not computed."""
        if self.echo and self.logprobs is not None:
            raise invalid("echo", "echo together with logprobs is not offered by this server", "unsupported_parameter")
        return bool(self.echo)

    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt an item. Raises RequestRefused."""
        found: Any = self.prompt
        if isinstance(found, str) or (found and isinstance(found[0], int)):
            found = [found]
        if not found:
            raise invalid("prompt", "prompt must not be empty: there is nothing to answer", "empty_prompt")
        if len(found) > MOST_PROMPTS:
            raise invalid("prompt", f"one request may hold at most {MOST_PROMPTS} prompts, not {len(found)}")
        prompts: list[str] | list[list[int]] = found
        return prompts

    def wishes(self) -> SamplingWishes:
        return SamplingWishes(
            **_plain_wishes(self), stop=self._stops(), max_tokens=self.max_tokens, logprobs=self.logprobs
        )


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(_Generating):
    messages: list[Message] = Field(max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages. Raises RequestRefused when two fields contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message", "continue_final_message and add_generation_prompt may not both be true"
            )
        opens_turn = self.add_generation_prompt is not False and not self.continue_final_message
        return {**(self.chat_template_kwargs or {}), "add_generation_prompt": opens_turn}

    def wishes(self) -> SamplingWishes:
        """Raises RequestRefused when two fields contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs may only be given when logprobs is true")
        newer = self.max_completion_tokens is not None
        return SamplingWishes(
            **_plain_wishes(self),
            stop=self._stops(),
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_parameter="max_completion_tokens" if newer else "max_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_parameter="top_logprobs",
        )


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]


BodyT = TypeVar("BodyT", bound=_Body)


def read_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Raises RequestRefused for malformed JSON, a wrong type, an unknown field or one that is not offered."""
    try:
        found = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "malformed_json") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body must be a JSON object, not {_json_noun(found)}", "malformed_json")
    offered = kind.model_fields
    for name in [name for name in found if name not in offered]:
        if name not in NEUTRAL_VALUES:
            raise invalid(name, f"unknown field: {name}", "unknown_parameter")
        if not _is_neutral(found[name], NEUTRAL_VALUES[name]):
            raise invalid(name, f"{name} is not offered by this server", "unsupported_parameter")
        del found[name]
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _wrong_field(error) from None


def _plain_wishes(body: _Generating) -> Mapping[str, Any]:
    """Raises RequestRefused."""
    return {
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": body.seed,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "include_stop": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _biases(body.logit_bias or {}),
        "grammar": body._grammar(),
    }


def _biases(written: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings; these are token ids."""
    for token in written:
        if not (token.isascii() and token.isdigit() and len(token) <= LONGEST_TOKEN_ID):
            raise invalid("logit_bias", f"logit_bias must map token ids to numbers; {token[:40]!r} is no token id")
    return {int(token): bias for token, bias in written.items()}


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    # True == 1 and False == 0 in Python, but not on the wire: `best_of: true` asks for something else than 1.
    return any(value == one and (isinstance(value, bool) == isinstance(one, bool) or one is False) for one in neutral)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _wrong_field(error: ValidationError) -> RequestRefused:
    """The refusal for the first field that is wrong; of a field with several forms, all that it may be."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    field = str(first["loc"][0])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _real_path(first["loc"]))[1:]
    if first["type"] == "missing":
        return invalid(path, f"{path} is required", "missing_parameter")
    if first["type"] == "extra_forbidden":
        return invalid(path, f"unknown field: {path}", "unknown_parameter")
    forms = {_TYPES[one["type"]] for one in errors if one["loc"][0] == field and one["type"] in _TYPES}
    if forms and len({len(one["loc"]) for one in errors}) == 1:
        return invalid(path, f"{path} must be {' or '.join(sorted(forms))}", "invalid_type")
    if field in ("prompt", "stop"):
        wanted = {
            "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
            "stop": "a string or a list of strings",
        }
        return invalid(field, f"{field} must be {wanted[field]}", "invalid_type")
    return invalid(path, f"{path}: {first['msg']}", "invalid_type")


_FORM_NAMES = frozenset({"str", "int", "float", "bool"})


def _real_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of a union's forms, which pydantic puts between."""
    return [
        part
        for index, part in enumerate(location)
        if isinstance(part, int) or index == 0 or (part not in _FORM_NAMES and "[" not in part)
    ]


def _json_noun(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "true or false"}.get(type(value), "a number")
