"""Request bodies: which fields there are and their types. Ranges are checked where both front ends share them
(`router.generation`).

Must not know: tokenizers, nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from router import grammar as grammars
from router.generation import SamplingWishes, checked_choices, invalid
from router.openai.parts import (
    Body,
    Function,
    Message,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Tool,
)

MOST_MESSAGES = 4096
MOST_PROMPTS = 128
MOST_TOOLS = 128
LONGEST_TOKEN_ID = 10


class _Generating(Body):
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def choices(self) -> int:
        """Raises RequestRefused."""
        return checked_choices(self.n)

    def streams(self) -> bool:
        """Raises RequestRefused when there are options for a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options may only be given when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs may not be given when stream is true")
        return bool(self.stream)

    def writes_no_special_tokens(self) -> bool | None:
        return self.skip_special_tokens

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

    def streams(self) -> bool:
        if self.stream and self.echoes_logprobs and self.choices() > 1:
            raise invalid("n", "n over 1 may not be given with echo, logprobs and stream together")
        return super().streams()

    @property
    def echoes_logprobs(self) -> bool:
        """The log probabilities of the answer begin with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompt_alone(self) -> bool:
        """Nothing but the prompt is to be said. A decode node draws one token all the same, and nobody sees it."""
        return bool(self.echo) and self.max_tokens == 0

    def _prompt_logprobs(self) -> int | None:
        """The more that is wanted of the two forms."""
        echoed = self.logprobs if self.echoes_logprobs else None
        return max((one for one in (echoed, self.prompt_logprobs) if one is not None), default=None)

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
            **_plain_wishes(self),
            stop=self._stops(),
            max_tokens=1 if self.prompt_alone else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
        )


class ChatBody(_Generating):
    messages: list[Message] = Field(max_length=MOST_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, str]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages. Raises RequestRefused when two fields contradict each other."""
        return template_variables(self)

    def calls_tools(self) -> bool:
        """Whether calls are looked for in the answer. Raises RequestRefused where there is no tool to be called."""
        if self.tools:
            return self.tool_choice != "none"
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice may only be given together with tools")
        return False

    @property
    def forces_call(self) -> bool:
        """A grammar writes the calls, whatever the model's own form is."""
        return bool(self.tools) and self.tool_choice not in (None, "auto", "none")

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @property
    def names_its_tool(self) -> bool:
        return isinstance(self.tool_choice, NamedTool)

    def writes_no_special_tokens(self) -> bool | None:
        """Some models' marks of a call are special tokens."""
        return False if self.skip_special_tokens is None and self.calls_tools() else self.skip_special_tokens

    def _grammar(self) -> str:
        free = super()._grammar()
        if not self.calls_tools() or not self.forces_call:
            return free
        if free:
            raise invalid("tool_choice", "tool_choice that asks for a call contradicts a form of the answer's text")
        return grammars.from_functions("tools", self._callable(), self.most_calls)

    def _callable(self) -> Sequence[tuple[str, Mapping[str, Any] | None]]:
        """Functions one of which must be called, with the schemas of their arguments."""
        functions: list[Function] = [tool.function for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            if not functions:
                raise invalid("tool_choice", f"tool_choice names {choice.function.name!r}, which is not one of tools")
        return [(function.name, function.parameters) for function in functions]

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
            prompt_logprobs=self.prompt_logprobs,
        )


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=MOST_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    documents: None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Variables of the chat template beside the messages. Raises RequestRefused when two fields contradict each other."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt may not both be true")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.tools:
        variables["tools"] = [tool.for_template() for tool in body.tools]
    if body.documents:
        variables["documents"] = body.documents
    opens_turn = body.add_generation_prompt is not False and not body.continue_final_message
    return {**variables, "add_generation_prompt": opens_turn}


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
        "skip_special_tokens": body.writes_no_special_tokens(),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _biases(body.logit_bias or {}),
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "bad_words": tuple(body.bad_words or ()),
        "grammar": body._grammar(),
    }


def _biases(written: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings; these are token ids."""
    for token in written:
        if not (token.isascii() and token.isdigit() and len(token) <= LONGEST_TOKEN_ID):
            raise invalid("logit_bias", f"logit_bias must map token ids to numbers; {token[:40]!r} is no token id")
    biases = {int(token): bias for token, bias in written.items()}
    if len(biases) < len(written):
        raise invalid("logit_bias", "logit_bias names one token twice, written in two ways")
    return biases
