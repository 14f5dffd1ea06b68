"""What all parsers of tool calls share: the forms of their results, who writes them down, and where a JSON object ends.

Must not know: how any model marks its calls.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

_STRUCTURE = re.compile(r'["\\{}\[\]]')
ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New arguments of one call; its first delta has its name and id."""

    index: int
    arguments: str
    name: str | None = None
    call_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's form of a delta."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolCallParser(Protocol):
    """One answer's."""

    def add(self, text: str) -> Parsed:
        """What is new in the answer."""

    def finish(self) -> Parsed:
        """What was held back, when the answer has ended."""


def long_id() -> str:
    return f"call_{secrets.token_hex(ID_BYTES)}"


class Findings:
    """What a parser has found since it was last asked. Spaces between a call and what follows are no content."""

    def __init__(self, most_calls: int | None) -> None:
        """`most_calls`: those beyond are dropped."""
        self._most_calls = most_calls
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._calls = 0
        self._after_call = False

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._content.append(text)
            self._after_call = False

    def begin_call(self, name: str, arguments: str, call_id: str) -> None:
        self._calls += 1
        self._after_call = True
        if self._wanted:
            self._deltas.append(CallDelta(self._calls - 1, arguments, name, call_id))

    def arguments(self, arguments: str) -> None:
        if arguments and self._wanted:
            self._deltas.append(CallDelta(self._calls - 1, arguments))

    def take(self) -> Parsed:
        parsed = Parsed("".join(self._content), tuple(self._deltas))
        self._content, self._deltas = [], []
        return parsed

    @property
    def _wanted(self) -> bool:
        return self._most_calls is None or self._calls <= self._most_calls


class Brackets:
    """Where the bracket closes that was open, or opens first, piece by piece; what is in a string closes nothing."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self.closed = False

    def read(self, text: str) -> int:
        """How much of `text` is understood: up to the closing bracket (then `closed`), or all but a lone backslash."""
        at = 0
        while (mark := _STRUCTURE.search(text, at)) is not None:
            at = mark.end()
            if self._in_string:
                if mark[0] == "\\":
                    if at == len(text):
                        return at - 1  # what it escapes comes later
                    at += 1
                elif mark[0] == '"':
                    self._in_string = False
            elif mark[0] == '"':
                self._in_string = True
            elif mark[0] in "{[":
                self._depth += 1
            elif mark[0] in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return at
        return len(text)


def whole_call(written: str, *, needs_arguments: bool = False) -> tuple[str, str] | None:
    """Name and arguments of a call whose members are in any order, or whose arguments are no object; None: it is none.

    `needs_arguments`: a name alone is no call."""
    try:
        call = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if needs_arguments and "arguments" not in call and "parameters" not in call:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def text_of(written: str) -> str | None:
    """Of a JSON string; None when it is none, for models write escapes that JSON does not have."""
    try:
        text: str = json.loads(written, strict=False)
    except ValueError:
        return None
    return text


def possible_beginning(text: str, mark: str) -> int:
    """Characters at the end that may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
