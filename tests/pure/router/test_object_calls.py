"""Llama's and Mistral's forms of tool calls: however the text is cut, and nothing that is no call is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls import PARSERS, LlamaCalls, MistralCalls, ToolCallParser

Calls = list[tuple[str, str]]


def read(parser: ToolCallParser, *pieces: str) -> tuple[str, Calls, list[str]]:
    """Content, calls and their ids, joined as a client joins them."""
    content = ""
    calls: list[list[str]] = []
    ids: list[str] = []
    for parsed in (*map(parser.add, pieces), parser.finish()):
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                assert delta.call_id is not None
                calls.append([delta.name, ""])
                ids.append(delta.call_id)
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls], ids


CALLED: list[tuple[str, str, Calls]] = [
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ("llama3_json", ' \n{"name": "f", "arguments": {}}', [("f", "{}")]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": "}{"}}', [("f", '{"a": "}{"}')]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": []}}', [("f", '{"a": []}')]),
    ("llama3_json", '{"parameters": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g", "arguments": {"b": {}}}]',
        [("f", "{}"), ("g", '{"b": {}}')],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]{}', [("f", '{"a": 1}'), ("g", "{}")]),
]


@pytest.mark.parametrize(("name", "text", "calls"), CALLED)
def test_calls_are_found_whole_and_character_by_character(name: str, text: str, calls: Calls) -> None:
    for pieces in ([text], list(text)):
        content, found, ids = read(PARSERS[name](None), *pieces)
        assert (content, found) == ("", calls)
        assert len(set(ids)) == len(calls)


@pytest.mark.parametrize("name", ["llama3_json", "mistral"])
@pytest.mark.parametrize(
    "text",
    [
        "words",
        '{"city": "Ulm", "days": [1, 2]}',
        '{"name": "Bob", "age": 3}',
        '{"name": 5, "parameters": {}}',
        '{"name": "a\\q", "parameters": {}}',
        '{"name": "f", "param',
        '<|python_tag|>print("x")',
        "<|python_tag|>",
        "<|python",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][1]",
        '[TOOL_CALLS][{"name": 5}]',
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f is what I call",
        "[TOOL_CALLS]f[ARGS]1",
        "[TOOL",
        "{",
        "  ",
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        content, calls, _ = read(PARSERS[name](None), *pieces)
        assert (content, calls) == (text, [])


def test_words_around_calls_are_content() -> None:
    assert read(MistralCalls(), 'Let me see. [TOOL_CALLS]f{"a": 1}\n Done')[:2] == (
        "Let me see. Done",
        [("f", '{"a": 1}')],
    )
    assert read(LlamaCalls(), 'So: <|python_tag|>{"name": "f", "parameters": {}} and then')[:2] == (
        "So: and then",
        [("f", "{}")],
    )
    broken = '{"name": "f", "parameters": {}}; {"nothing": 1} more'
    assert read(LlamaCalls(), broken)[:2] == ('; {"nothing": 1} more', [("f", "{}")])
    forgotten = '{"name": "f", "parameters": {} these words'
    assert read(LlamaCalls(), forgotten)[:2] == ("these words", [("f", "{}")])


def test_of_several_calls_only_as_many_as_are_wanted() -> None:
    two = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert read(LlamaCalls(1), two)[:2] == ("", [("f", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    parser = MistralCalls()
    pieces = ['[TOOL_CALLS]f{"a', '": 1', "2", "}"]
    assert [[delta.arguments for delta in parser.add(piece).calls] for piece in pieces] == [
        ["", '{"a'],
        ['": 1'],
        ["2"],
        ["}"],
    ]


def test_mistrals_ids_are_as_its_templates_want_them() -> None:
    _, _, ids = read(MistralCalls(), "[TOOL_CALLS]f{}[TOOL_CALLS]g{}")
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)


PARTS = [
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    '{"name": "f", "parameters": {"x": "}{\\"", "y": [{}]}}',
    '{"name": "f", "arguments": {}, "id": "a"}',
    '{"arguments": {"x": 1}, "name": "g"}',
    '{"name": "h", "parameters": {}',
    '{"name": "h"',
    '{"name": "\\q", "parameters": {}}',
    '{"a": 1}',
    "f",
    "g{}",
    "[",
    "]",
    "; ",
    ", ",
    "\n",
    " ",
    "words ",
    "<|py",
    "[TOOL",
    "}",
    '"',
    "\\",
]
PARSER = st.sampled_from([LlamaCalls, MistralCalls])
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(PARSER, TEXTS, st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_where_the_text_is_cut_changes_nothing(
    parser: Callable[[], ToolCallParser], text: str, cuts: list[int]
) -> None:
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    assert read(parser(), *pieces)[:2] == read(parser(), text)[:2] == read(parser(), *text)[:2]


@given(PARSER, TEXTS)
def test_every_word_is_content_or_stands_in_a_call(parser: Callable[[], ToolCallParser], text: str) -> None:
    content, calls, _ = read(parser(), text)
    everything = content + "".join(name + arguments for name, arguments in calls)
    assert everything.count("words") == text.count("words")
    if not calls:
        assert content == text


@given(PARSER, st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=4))
def test_arguments_of_any_text_come_back(parser: Callable[[], ToolCallParser], arguments: dict[str, str]) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    text = f'{{"name": "f", "parameters": {written}}}' if parser is LlamaCalls else f"[TOOL_CALLS]f[ARGS]{written}"
    content, ((name, found),), _ = read(parser(), *text)
    assert (content, name, json.loads(found)) == ("", "f", arguments)
