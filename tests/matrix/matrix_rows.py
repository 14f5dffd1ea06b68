"""The option matrix: for every field of the API a request that uses it, and what must be true of its answer.

`asked` may be a function of the plain answer, where a value only means something beside it (a stop string that occurs).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.openai.bodies import ChatBody, CompletionBody
from router.openai.reading import NEUTRAL_VALUES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = (
    "The history of the city begins on the river, where merchants from the north met those of the south. Each of them brought "
    "what the other lacked: salt, iron, cloth and grain. After some years they built a bridge, and"
)
MESSAGES = [
    {
        "role": "system",
        "content": "You are a guide who knows every river, bridge and market of the old city by its name.",
    },
    {"role": "user", "content": "Tell me in two sentences what the merchants of the old city sold on the bridge."},
]
SEEDED = {"temperature": 0.9, "seed": 11}
STREAM_OF_SCORES = {"prompt_logprobs": 1, "stream": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "bridges": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "bridges"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find_bridge", "description": "finds a bridge of the city", "parameters": SCHEMA},
    }
]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "find_bridge", "arguments": '{"city": "Ulm", "bridges": 2}'},
        }
    ],
}
TOOL_SAID = {"role": "tool", "tool_call_id": "call_1", "content": "It lies in the south."}


@dataclass(frozen=True)
class Answer:
    """What a client has got, whole or streamed, without what differs from request to request."""

    status: int
    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    usages: int = 0
    """Chunks that told the usage."""

    @property
    def text(self) -> str:
        return str(self.choices[0]["text"])

    @property
    def tokens(self) -> list[int]:
        return list(self.choices[0]["token_ids"])

    @property
    def finish(self) -> str:
        return str(self.choices[0]["finish_reason"])


Asked = Mapping[str, Any] | Callable[[Answer], Mapping[str, Any]]
Check = Callable[[Answer, Answer], bool]
"""Of the answer, beside the plain one."""


@dataclass(frozen=True)
class Row:
    field: str
    path: str
    asked: Asked
    check: Check
    """A refusal, too, is compared with what is expected."""
    refused: str = ""
    """The parameter that a 4xx must name; empty: it must work."""
    streams: bool = True
    """Whether it may be asked as a stream too."""


def body_of(row: Row, plain: Answer) -> dict[str, Any]:
    asked = row.asked(plain) if callable(row.asked) else row.asked
    base = {"prompt": PROMPT} if row.path == COMPLETIONS else {"messages": MESSAGES}
    return {**base, "max_tokens": 24, "temperature": 0, "return_token_ids": True, **asked}


def differs(answer: Answer, plain: Answer) -> bool:
    return answer.tokens != plain.tokens


def same(answer: Answer, plain: Answer) -> bool:
    return answer.tokens == plain.tokens


def follows_schema(answer: Answer, _: Answer) -> bool:
    return answer.finish == "stop" and is_city(answer.text)


def is_city(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"city", "bridges"}
        and isinstance(found["city"], str)
        and len(found["city"]) <= 12
        and type(found["bridges"]) is int
        and 0 <= found["bridges"] <= 99
    )


def calls_the_tool(answer: Answer, _: Answer) -> bool:
    (call,) = answer.choices[0]["tool_calls"]
    return call["function"]["name"] == "find_bridge" and is_city(call["function"]["arguments"])


def _both(name: str, asked: Asked, check: Check) -> list[Row]:
    return [Row(name, path, asked, check) for path in (COMPLETIONS, CHAT)]


def _word(plain: Answer) -> str:
    """A word in the middle of the plain answer."""
    return plain.text.split()[5]


def _structured() -> list[Row]:
    json_schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    room = {"max_tokens": 120}
    choice = ["a stone bridge", "a wooden bridge", "no bridge"]
    lark = 'start: "The " ("old" | "new") " bridge" /[.!]/'

    def chosen(answer: Answer, _: Answer) -> bool:
        return answer.text in choice

    def matches(answer: Answer, _: Answer) -> bool:
        left, dash, right = answer.text.partition("-")
        return dash == "-" and len(left) == 3 and left.isupper() and 1 <= len(right) <= 4 and right.isdigit()

    def sentence(answer: Answer, _: Answer) -> bool:
        return answer.text[:-1] in ("The old bridge", "The new bridge") and answer.text[-1] in ".!"

    def an_object(answer: Answer, _: Answer) -> bool:
        return answer.text.lstrip().startswith("{")

    rows = [
        *_both("response_format", {"response_format": json_schema, **room}, follows_schema),
        *_both("response_format", {"response_format": json_schema, **room, **SEEDED}, follows_schema),
        *_both("response_format", {"response_format": {"type": "json_object"}}, an_object),
        *_both("response_format", {"response_format": {"type": "text"}}, same),
    ]
    for field_name, asked, check in (
        ("json", SCHEMA, follows_schema),
        ("regex", "[A-Z]{3}-[0-9]{1,4}", matches),
        ("choice", choice, chosen),
        ("grammar", lark, sentence),
    ):
        rows += _both("structured_outputs", {"structured_outputs": {field_name: asked}, **room, **SEEDED}, check)
        rows += _both(f"guided_{field_name}", {f"guided_{field_name}": asked, **room}, check)
    rows += _both("structured_outputs", {"structured_outputs": {"json_object": True}, **SEEDED}, an_object)
    return rows


def _sampling() -> list[Row]:
    def length(count: int) -> Check:
        return lambda answer, _: len(answer.tokens) == count and answer.finish == "length"

    def stopped(answer: Answer, plain: Answer) -> bool:
        return answer.finish == "stop" and plain.text.startswith(answer.text) and _word(plain) not in answer.text

    def kept_stop(answer: Answer, plain: Answer) -> bool:
        return answer.finish == "stop" and answer.text.endswith(_word(plain))

    def ended_by_token(answer: Answer, plain: Answer) -> bool:
        return answer.finish == "stop" and answer.tokens[-1] == plain.tokens[6] and len(answer.tokens) <= 7

    def outlives(answer: Answer, _: Answer) -> bool:
        return len(answer.tokens) >= 20

    def three(answer: Answer, _: Answer) -> bool:
        texts = [choice["text"] for choice in answer.choices]
        return len(texts) == 3 and len(set(texts)) == 3

    def only_allowed(answer: Answer, plain: Answer) -> bool:
        return set(answer.tokens) <= set(plain.tokens[:8])

    def without_word(answer: Answer, plain: Answer) -> bool:
        return _word(plain) not in answer.text.split()

    def biased(answer: Answer, plain: Answer) -> bool:
        return plain.tokens[0] not in answer.tokens

    return [
        *_both("max_tokens", {"max_tokens": 5}, length(5)),
        *_both("temperature", SEEDED, differs),
        *_both("seed", {**SEEDED, "seed": 12}, differs),
        *_both("top_p", {**SEEDED, "top_p": 0.5}, lambda *_: True),
        *_both("top_k", {**SEEDED, "top_k": 3}, lambda *_: True),
        *_both("min_p", {**SEEDED, "min_p": 0.2}, lambda *_: True),
        *_both("n", {**SEEDED, "n": 3}, three),
        *_both("stop", lambda plain: {"stop": [_word(plain)]}, stopped),
        *_both(
            "include_stop_str_in_output",
            lambda plain: {"stop": _word(plain), "include_stop_str_in_output": True},
            kept_stop,
        ),
        *_both("stop_token_ids", lambda plain: {"stop_token_ids": [plain.tokens[6]]}, ended_by_token),
        *_both("min_tokens", lambda plain: {"stop_token_ids": [plain.tokens[6]], "min_tokens": 20}, outlives),
        *_both("ignore_eos", {"ignore_eos": True, "max_tokens": 90}, length(90)),
        *_both("repetition_penalty", {"repetition_penalty": 1.4}, differs),
        *_both("presence_penalty", {"presence_penalty": 2.0, **SEEDED}, lambda *_: True),
        *_both("frequency_penalty", {"frequency_penalty": 2.0, **SEEDED}, lambda *_: True),
        *_both("logit_bias", lambda plain: {"logit_bias": {str(plain.tokens[0]): -100}}, biased),
        *_both("allowed_token_ids", lambda plain: {"allowed_token_ids": plain.tokens[:8], **SEEDED}, only_allowed),
        *_both("bad_words", lambda plain: {"bad_words": [_word(plain)]}, without_word),
    ]


def _text() -> list[Row]:
    def usage(answer: Answer, plain: Answer) -> bool:
        return answer.usage == plain.usage

    def cut_to(count: int) -> Check:
        return lambda answer, _: answer.usage["prompt_tokens"] == count

    def has_logprobs(answer: Answer, _: Answer) -> bool:
        return bool(answer.choices[0]["logprobs"])

    def named_by_id(answer: Answer, _: Answer) -> bool:
        return "token_id:" in json.dumps(answer.choices[0]["logprobs"])

    return [
        *_both("model", {"model": "SmolLM2-135M-Instruct"}, same),
        *_both("stream", {"stream": True}, same),
        *_both("stream_options", {"stream": True, "stream_options": {"include_usage": True}}, usage),
        *_both(
            "stream_options",
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            lambda answer, plain: usage(answer, plain) and answer.usages > 5,
        ),
        *_both(
            "skip_special_tokens", {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 60}, outlives_60
        ),
        *_both("add_special_tokens", {"add_special_tokens": False}, lambda *_: True),
        *_both("return_token_ids", {"return_token_ids": True}, same),
        *_both("truncate_prompt_tokens", {"truncate_prompt_tokens": 20}, cut_to(20)),
        *_both("truncation_side", {"truncate_prompt_tokens": 20, "truncation_side": "right"}, cut_to(20)),
        *_both("user", {"user": "somebody"}, same),
        *_both("metadata", {"metadata": {"a": "b"}}, same),
        Row("logprobs", COMPLETIONS, {"logprobs": 3}, has_logprobs),
        Row("logprobs", CHAT, {"logprobs": True}, has_logprobs),
        Row("top_logprobs", CHAT, {"logprobs": True, "top_logprobs": 3}, has_logprobs),
        Row(
            "return_tokens_as_token_ids", COMPLETIONS, {"logprobs": 1, "return_tokens_as_token_ids": True}, named_by_id
        ),
        Row("return_tokens_as_token_ids", CHAT, {"logprobs": True, "return_tokens_as_token_ids": True}, named_by_id),
        Row("prompt", COMPLETIONS, {"prompt": list(range(1000, 1040))}, lambda *_: True),
        Row("prompt", COMPLETIONS, {"prompt": [PROMPT, "One more"]}, lambda answer, _: len(answer.choices) == 2),
        Row("echo", COMPLETIONS, {"echo": True}, lambda answer, _: answer.text.startswith(PROMPT)),
        Row("echo", COMPLETIONS, {"echo": True, "logprobs": 1}, echoes_logprobs),
        Row("echo", COMPLETIONS, {"echo": True, "logprobs": 1, "prompt": list(range(900, 940))}, echoes_logprobs),
        Row("echo", COMPLETIONS, {"echo": True, "logprobs": 2, "max_tokens": 0}, echoes_logprobs),
        *(
            Row("prompt_logprobs", path, {"prompt_logprobs": 2}, scores_prompt, streams=False)
            for path in (COMPLETIONS, CHAT)
        ),
        *(
            Row("prompt_logprobs", path, STREAM_OF_SCORES, lambda *_: True, refused="prompt_logprobs")
            for path in (COMPLETIONS, CHAT)
        ),
    ]


def echoes_logprobs(answer: Answer, _: Answer) -> bool:
    """The prompt's come first, and each token stands in the text where it is said to."""
    told, prompt_tokens = answer.choices[0]["logprobs"], answer.usage["prompt_tokens"]
    placed = zip(told["tokens"], told["text_offset"], strict=True)
    return (
        len(told["tokens"]) == prompt_tokens + len(answer.tokens)
        and told["token_logprobs"][0] is None
        and all(value <= 0 for value in told["token_logprobs"][1:])
        and all("\ufffd" in token or answer.text.startswith(token, at) for token, at in placed)
    )


def scores_prompt(answer: Answer, plain: Answer) -> bool:
    nothing, *scores = answer.choices[0]["prompt_logprobs"]
    ranks = [sorted(one["rank"] for one in score.values())[:2] for score in scores]
    return nothing is None and len(scores) == answer.usage["prompt_tokens"] - 1 and ranks == [[1, 2]] * len(scores)


def outlives_60(answer: Answer, _: Answer) -> bool:
    return len(answer.tokens) == 60


def _chat() -> list[Row]:
    named = {"type": "function", "function": {"name": "find_bridge"}}
    goes_on = [*MESSAGES, {"role": "assistant", "content": "The merchants sold"}]
    room = {"max_tokens": 120, "tools": TOOLS}
    return [
        Row(
            "messages", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]}, differs
        ),
        Row("messages", CHAT, {"messages": [*MESSAGES, CALLED, TOOL_SAID]}, differs),
        Row("max_completion_tokens", CHAT, {"max_completion_tokens": 4}, lambda answer, _: len(answer.tokens) == 4),
        Row("add_generation_prompt", CHAT, {"add_generation_prompt": False}, lambda *_: True),
        Row("continue_final_message", CHAT, {"messages": goes_on, "continue_final_message": True}, differs),
        Row("chat_template_kwargs", CHAT, {"chat_template_kwargs": {"mood": "good"}}, same),
        Row("documents", CHAT, {"documents": [{"text": "The bridge is of stone."}]}, differs),
        Row("tools", CHAT, {"tools": TOOLS}, differs),
        Row(
            "tool_choice", CHAT, {**room, "tool_choice": "none"}, lambda answer, _: not answer.choices[0]["tool_calls"]
        ),
        Row("tool_choice", CHAT, {**room, "tool_choice": "required", "parallel_tool_calls": False}, calls_the_tool),
        Row("tool_choice", CHAT, {**room, "tool_choice": named, **SEEDED}, calls_the_tool),
        Row(
            "parallel_tool_calls",
            CHAT,
            {**room, "tool_choice": "required", "parallel_tool_calls": False},
            calls_the_tool,
        ),
    ]


def _refused() -> list[Row]:
    names = {
        path: sorted(NEUTRAL_VALUES.keys() - kind.model_fields.keys())
        for path, kind in ((COMPLETIONS, CompletionBody), (CHAT, ChatBody))
    }
    return [
        Row(name, path, {name: {"x": 1}}, lambda *_: True, refused=name)
        for path in (COMPLETIONS, CHAT)
        for name in (*names[path], "nonsense")
    ]


def _last_token() -> list[Row]:
    """F20: what ends an answer at its first token, or may not end it."""

    def ended_at_once(answer: Answer, _: Answer) -> bool:
        return answer.finish == "stop" and len(answer.tokens) == 1

    def empty(answer: Answer, _: Answer) -> bool:
        return answer.finish == "stop" and answer.text == ""

    def one(answer: Answer, plain: Answer) -> bool:
        return answer.finish == "length" and answer.tokens == plain.tokens[:1]

    rows = [
        *_both("F20 first token stops", lambda plain: {"stop_token_ids": plain.tokens[:1]}, ended_at_once),
        *_both("F20 stop string at once", lambda plain: {"stop": plain.text[:2]}, empty),
        *_both("F20 one token", {"max_tokens": 1}, one),
    ]
    return rows + [
        Row("F20 min over max", path, {"min_tokens": 25}, lambda *_: True, refused="min_tokens")
        for path in (COMPLETIONS, CHAT)
    ]


ROWS: Sequence[Row] = (*_sampling(), *_text(), *_structured(), *_chat(), *_last_token(), *_refused())


def uncovered() -> list[str]:
    """Fields of the API without a row."""
    covered = {(row.path, row.field) for row in ROWS}
    known = {COMPLETIONS: CompletionBody.model_fields, CHAT: ChatBody.model_fields}
    return [f"{path} {name}" for path, fields in known.items() for name in fields if (path, name) not in covered]
