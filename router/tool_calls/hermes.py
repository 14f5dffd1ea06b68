"""Tool calls in Hermes' form (Nous Research's, as vLLM's parser `hermes` reads it), which Qwen and others share:

    <tool_call>
    {"name": "...", "arguments": {...}}
    </tool_call>

Must not know: requests, grammars, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from router.grammar import CALL_BEGINS, CALL_ENDS
from router.tool_calls.base import Brackets, Findings, Parsed, long_id, possible_beginning, text_of, whole_call

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_OVER = re.compile(f"{CALL_ENDS}|(?={CALL_BEGINS})")


class _Place(Enum):
    CONTENT = "content"
    HEAD = "head"
    """Behind the mark; the name has not come yet."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """Behind the arguments."""


class HermesCalls:
    """A `ToolCallParser`. `most_calls`: those beyond are dropped."""

    def __init__(self, most_calls: int | None = None, new_id: Callable[[], str] = long_id) -> None:
        self._place = _Place.CONTENT
        self._held = ""
        self._new_id = new_id
        self._found = Findings(most_calls)
        self._brackets = Brackets()

    def add(self, text: str) -> Parsed:
        self._held += text
        while _STEPS[self._place](self):
            pass
        return self._found.take()

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        match self._place:
            case _Place.CONTENT:
                self._found.content(held)
            case _Place.HEAD:
                if not self._whole_call(held):
                    self._found.content(CALL_BEGINS + held)
            case _Place.ARGUMENTS:
                self._found.arguments(held)
            case _Place.TAIL:
                pass
        return self._found.take()

    # Each step takes what it can from `_held`; True: another step may go on.

    def _read_content(self) -> bool:
        start = self._held.find(CALL_BEGINS)
        end = start if start >= 0 else len(self._held) - possible_beginning(self._held, CALL_BEGINS)
        self._found.content(self._held[:end])
        if start < 0:
            self._held = self._held[end:]
            return False
        self._held = self._held[start + len(CALL_BEGINS) :]
        self._place = _Place.HEAD
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._held)
        name = text_of(head[1]) if head is not None else None
        if head is not None and name is not None:
            self._found.begin_call(name, "", self._new_id())
            self._held = self._held[head.end() :]
            self._place, self._brackets = _Place.ARGUMENTS, Brackets()
            return True
        end = self._held.find(CALL_ENDS)
        if end < 0:
            return False
        body, self._held = self._held[:end], self._held[end + len(CALL_ENDS) :]
        if not self._whole_call(body):
            self._found.content(CALL_BEGINS + body + CALL_ENDS)
        self._place = _Place.CONTENT
        return True

    def _read_arguments(self) -> bool:
        end = self._brackets.read(self._held)
        self._found.arguments(self._held[:end])
        self._held = self._held[end:]
        if self._brackets.closed:
            self._place = _Place.TAIL
        return self._brackets.closed

    def _read_tail(self) -> bool:
        """Up to the mark that ends the call, which some models forget before the next one."""
        over = _OVER.search(self._held)
        if over is None:
            return False
        self._held = self._held[over.end() :]
        self._place = _Place.CONTENT
        return True

    def _whole_call(self, body: str) -> bool:
        call = whole_call(body)
        if call is not None:
            self._found.begin_call(*call, self._new_id())
        return call is not None


_STEPS: dict[_Place, Callable[[HermesCalls], bool]] = {
    _Place.CONTENT: HermesCalls._read_content,
    _Place.HEAD: HermesCalls._read_head,
    _Place.ARGUMENTS: HermesCalls._read_arguments,
    _Place.TAIL: HermesCalls._read_tail,
}
