"""Tool calls in an answer's text, found piece by piece: the text beside them is content, a call's arguments go on as they come.

Hermes' form (Nous Research's, as vLLM's parser `hermes` reads it), which Qwen and others share:

    <tool_call>
    {"name": "...", "arguments": {...}}
    </tool_call>

The arguments are the model's own words, unchanged, so what a stream's deltas join to is what the whole answer holds. What only
looks like a call is content. An answer that is cut in mid-call ends with a call whose arguments are cut.

Must not know: requests, grammars, HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from router.grammar import CALL_BEGINS, CALL_ENDS

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_OVER = re.compile(f"{CALL_ENDS}|(?={CALL_BEGINS})")
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


class _Place(Enum):
    CONTENT = "content"
    HEAD = "head"
    """Behind the mark; the name has not come yet."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """Behind the arguments."""


class HermesCalls:
    """A `ToolCallParser`. `most_calls`: those beyond are dropped."""

    def __init__(self, most_calls: int | None = None) -> None:
        self._most_calls = most_calls
        self._place = _Place.CONTENT
        self._held = ""
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._calls = 0
        self._after_call = False
        """Spaces that follow a call are no content."""
        self._depth = 0
        self._in_string = False

    def add(self, text: str) -> Parsed:
        self._held += text
        while _STEPS[self._place](self):
            pass
        return self._take()

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        match self._place:
            case _Place.CONTENT:
                self._content.append(held)
            case _Place.HEAD:
                if not self._whole_call(held):
                    self._content.append(CALL_BEGINS + held)
            case _Place.ARGUMENTS:
                self._arguments_delta(held)
            case _Place.TAIL:
                pass
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), tuple(self._deltas))
        self._content, self._deltas = [], []
        return parsed

    # Each step takes what it can from `_held`; True: another step may go on.

    def _read_content(self) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        start = self._held.find(CALL_BEGINS)
        end = start if start >= 0 else len(self._held) - _possible_beginning(self._held)
        if end:
            self._content.append(self._held[:end])
            self._after_call = False
        if start < 0:
            self._held = self._held[end:]
            return False
        self._held = self._held[start + len(CALL_BEGINS) :]
        self._place = _Place.HEAD
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._held)
        name = _text_of(head[1]) if head is not None else None
        if head is not None and name is not None:
            self._begin_call(name, "")
            self._held = self._held[head.end() :]
            self._place, self._depth, self._in_string = _Place.ARGUMENTS, 0, False
            return True
        end = self._held.find(CALL_ENDS)
        if end < 0:
            return False
        body, self._held = self._held[:end], self._held[end + len(CALL_ENDS) :]
        if not self._whole_call(body):
            self._content.append(CALL_BEGINS + body + CALL_ENDS)
        self._place = _Place.CONTENT
        return True

    def _read_arguments(self) -> bool:
        """Up to the bracket that closes them; what is in a string closes nothing."""
        at, held = 0, self._held
        while (mark := _STRUCTURE.search(held, at)) is not None:
            at = mark.end()
            if self._in_string:
                if mark[0] == "\\":
                    if at == len(held):
                        at -= 1  # what it escapes comes later
                        break
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
                    self._place = _Place.TAIL
                    break
        else:
            at = len(held)
        self._arguments_delta(held[:at])
        self._held = held[at:]
        return self._place is _Place.TAIL

    def _read_tail(self) -> bool:
        """Up to the mark that ends the call, which some models forget before the next one."""
        over = _OVER.search(self._held)
        if over is None:
            return False
        self._held = self._held[over.end() :]
        self._place = _Place.CONTENT
        return True

    # Calls

    def _whole_call(self, body: str) -> bool:
        """A call in another order, or with arguments that are no object."""
        try:
            call = json.loads(body, strict=False)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        self._begin_call(call["name"], json.dumps(arguments, ensure_ascii=False))
        return True

    def _begin_call(self, name: str, arguments: str) -> None:
        self._calls += 1
        self._after_call = True
        if self._wanted:
            self._deltas.append(CallDelta(self._calls - 1, arguments, name, f"call_{secrets.token_hex(ID_BYTES)}"))

    def _arguments_delta(self, arguments: str) -> None:
        if arguments and self._wanted:
            self._deltas.append(CallDelta(self._calls - 1, arguments))

    @property
    def _wanted(self) -> bool:
        return self._most_calls is None or self._calls <= self._most_calls


_STEPS: dict[_Place, Callable[[HermesCalls], bool]] = {
    _Place.CONTENT: HermesCalls._read_content,
    _Place.HEAD: HermesCalls._read_head,
    _Place.ARGUMENTS: HermesCalls._read_arguments,
    _Place.TAIL: HermesCalls._read_tail,
}


def _text_of(written: str) -> str | None:
    """Of a JSON string; None when it is none, for models write escapes that JSON does not have."""
    try:
        text: str = json.loads(written, strict=False)
    except ValueError:
        return None
    return text


def _possible_beginning(text: str) -> int:
    """Characters at the end that may be the beginning of a call's mark."""
    for length in range(min(len(CALL_BEGINS) - 1, len(text)), 0, -1):
        if CALL_BEGINS.startswith(text[-length:]):
            return length
    return 0


PARSERS: dict[str, Callable[[int | None], ToolCallParser]] = {"hermes": HermesCalls}
"""By the name that --tool-call-parser takes."""
