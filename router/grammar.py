"""What an answer must follow, from what clients write to a grammar in llguidance's form, which the decode node applies.

Must not know: HTTP, gRPC, nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from router.generation import invalid

LONGEST_GRAMMAR = 1 << 16
MOST_CHOICES = 1024
BOUNDED_SPACE = {"x-guidance": {"whitespace_pattern": r"(\r?\n)?[ \t]{0,20}"}}
"""Between the parts of a JSON text: a line break and an indentation. Without a bound, small models write spaces for ever."""


def any_object(parameter: str) -> str:
    return from_schema(parameter, {"type": "object"})


def from_schema(parameter: str, schema: Mapping[str, Any] | bool | str) -> str:
    """Of a JSON schema, or of its text. Raises RequestRefused."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(parameter, f"{parameter} is not valid JSON: {error}") from None
        if not isinstance(schema, (dict, bool)):
            raise invalid(parameter, f"{parameter} must hold a JSON schema, which is an object")
    if schema is not False:
        schema = {**BOUNDED_SPACE, **({} if schema is True else schema)}
    return checked(parameter, LLMatcher.grammar_from_json_schema(_written(parameter, schema)))


def from_regex(parameter: str, regex: str) -> str:
    """The whole answer matches. Raises RequestRefused."""
    return checked(parameter, LLMatcher.grammar_from_regex(regex))


def from_choice(parameter: str, choices: Sequence[str]) -> str:
    """The answer is one of them. Raises RequestRefused."""
    if not 1 <= len(choices) <= MOST_CHOICES or not all(choices):
        raise invalid(parameter, f"{parameter} must hold 1 to {MOST_CHOICES} texts, none of them empty")
    return checked(parameter, LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))


CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""Around a call's JSON, as in Hermes models."""


def from_functions(
    parameter: str, functions: Sequence[tuple[str, Mapping[str, Any] | None]], most_calls: int | None
) -> str:
    """The answer is nothing but calls of these functions, with arguments that follow their schemas, as `router.tool_calls` reads
    them. `most_calls`: 1, or None for any number. Raises RequestRefused."""
    rules = []
    for index, (name, schema) in enumerate(functions):
        call = {
            **BOUNDED_SPACE,
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema or {"type": "object", "properties": {}}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        rules.append(f"function_{index}: %json {_written(parameter, call)}")
    one_of = " | ".join(f"function_{index}" for index in range(len(functions)))
    more = "" if most_calls == 1 else ' ("\\n" call)*'
    call_rule = f'call: "{CALL_BEGINS}\\n" ({one_of}) "\\n{CALL_ENDS}"'
    return checked(parameter, LLMatcher.grammar_from_lark("\n".join([f"start: call{more}", call_rule, *rules])))


def from_lark(parameter: str, grammar: str) -> str:
    """Raises RequestRefused."""
    if not grammar.strip():
        raise invalid(parameter, f"{parameter} must not be empty")
    return checked(parameter, LLMatcher.grammar_from_lark(grammar))


def _written(parameter: str, schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise invalid(parameter, f"{parameter} is nested too deeply") from None


def checked(parameter: str, grammar: str) -> str:
    if len(grammar) > LONGEST_GRAMMAR:
        raise invalid(parameter, f"{parameter} is longer than {LONGEST_GRAMMAR} characters")
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise invalid(parameter, f"{parameter} cannot be followed: {problem.splitlines()[0]}")
    return grammar
