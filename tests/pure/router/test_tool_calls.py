"""Calls in an answer's text: whole and in a stream, however the text is cut; what only looks like a call stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from router_model_folder import byte_tokenizer

from router.generation import RequestRefused
from router.grammar import from_functions
from router.tool_calls import HermesCalls, Parsed

TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm \\"{\\" \\\\", "days": [1, {"a": 2}]}}\n'
    "</tool_call>"
    '\n<tool_call>{"name":"time","arguments":{}}</tool_call>'
)


class Reader:
    def __init__(self, most_calls: int | None = None) -> None:
        self.parser = HermesCalls(most_calls)
        self.content = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []

    def read(self, *pieces: str) -> Reader:
        for piece in pieces:
            self._take(self.parser.add(piece))
        self._take(self.parser.finish())
        return self

    def _take(self, parsed: Parsed) -> None:
        self.content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(self.calls)
                assert delta.call_id is not None
                self.ids.append(delta.call_id)
                self.calls.append([delta.name, ""])
            self.calls[delta.index][1] += delta.arguments


def test_content_and_calls_are_told_apart() -> None:
    found = Reader().read(TWO)
    assert found.content == "Let me see.\n"
    assert [name for name, _ in found.calls] == ["weather", "time"]
    assert json.loads(found.calls[0][1]) == {"city": 'Ulm "{" \\', "days": [1, {"a": 2}]}
    assert found.calls[1][1] == "{}"
    assert len(set(found.ids)) == 2


TEXTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {"x": "}{\\\\\\"", "y": [{}]}}',
            '{"arguments": {"x": 1}, "name": "g"}',
            '{"name": "h", "arguments": "text"}',
            '{"name": "h"',
            '{"name": "\\q", "arguments": {}}',
            "<tool",
            "call>",
            "\n",
            " ",
            "words ",
            "{}",
            '"',
            "\\",
        ]
    ),
    max_size=12,
).map("".join)


@given(TEXTS, st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_where_the_text_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    whole, cut_up = Reader().read(text), Reader().read(*pieces)
    assert (cut_up.content, cut_up.calls) == (whole.content, whole.calls)


@given(st.text(alphabet="abc<>/_tol \n{}", max_size=60))
def test_text_without_a_call_comes_out_as_it_is(text: str) -> None:
    if "<tool_call>" not in text:
        assert Reader().read(*text).content == text


def test_arguments_come_as_they_are_written() -> None:
    reader = Reader()
    pieces = ['<tool_call>{"name": "f", "arguments": {"a', '": 1', "2", "}", "}</tool_call>"]
    deltas = [[delta.arguments for delta in reader.parser.add(piece).calls] for piece in pieces]
    assert deltas == [["", '{"a'], ['": 1'], ["2"], ["}"], []]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\u12", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "argum',
        "a <tool_ca",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    found = Reader().read(*text)
    assert (found.content, found.calls) == (text, [])


def test_a_call_without_an_end_mark_hides_no_other() -> None:
    found = Reader().read(*'<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}')
    assert (found.content, found.calls) == ("", [["f", "{}"], ["g", "{}"]])


def test_an_answer_that_is_cut_in_mid_call_ends_with_what_there_is() -> None:
    assert Reader().read('<tool_call>{"name": "f", "arguments": {"a": "b').calls == [["f", '{"a": "b']]
    assert Reader().read('<tool_call>{"name": "f", "arguments": {"a": 1}').calls == [["f", '{"a": 1}']]


def test_of_several_calls_only_as_many_as_are_wanted() -> None:
    assert [name for name, _ in Reader(1).read(TWO).calls] == ["weather"]


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(byte_tokenizer().to_str(), n_vocab=257, eos_token=[256]), grammar, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def test_a_forced_answer_is_calls_of_the_tools_with_sound_arguments_and_nothing_else() -> None:
    grammar = from_functions("tools", [("weather", WEATHER), ("time", None)], None)
    assert follows(grammar, call("weather", {"city": "Ulm", "days": 3}))
    assert follows(grammar, call("time", {}) + "\n" + call("weather", {"city": "\u00e9"}))
    for wrong in (
        "no call",
        call("weather", {"days": 3}),
        call("weather", {"city": 3}),
        call("weather", {"city": "Ulm", "more": 1}),
        call("other", {}),
        "",
    ):
        assert not follows(grammar, wrong), wrong
    assert not follows(from_functions("tools", [("time", None)], 1), call("time", {}) + "\n" + call("time", {}))


def test_a_schema_that_cannot_be_followed_is_refused_by_name() -> None:
    with pytest.raises(RequestRefused) as refused:
        from_functions("tools", [("f", {"type": "nonsense"})], None)
    assert refused.value.refusal.parameter == "tools"
