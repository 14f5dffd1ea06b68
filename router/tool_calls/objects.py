"""Tool calls as JSON objects that follow each other: Llama's form and Mistral's, as vLLM's parsers of these names read them.

    llama3_json    {"name": "...", "parameters": {...}}; {"name": ...         at the answer's beginning, or behind <|python_tag|>
    mistral        [TOOL_CALLS][{"name": "...", "arguments": {...}}, ...]     and, since version 11 of its tokenizer:
                   [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name{...

An object that is no call ends the calls: it is content, with its mark and what had come since.

Must not know: requests, grammars, HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from router.tool_calls.base import Brackets, Findings, Parsed, long_id, possible_beginning, text_of, whole_call

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    re.DOTALL,
)
_NAMED_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*(?:[\w.-]+\s*(?:\[[A-Z_]*\]?\w*\s*){0,2})?")
"""What every beginning of a named head looks like."""
SHORT_ID_BYTES = 5
SHORT_ID_CHARACTERS = 9
"""Mistral's chat templates take ids of this length only."""


def short_id() -> str:
    return secrets.token_hex(SHORT_ID_BYTES)[:SHORT_ID_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of models writes calls. `opening` and `closing` stand around all objects behind one mark; empty: nothing."""

    mark: str
    separators: str
    opening: str
    closing: str
    at_beginning: bool
    """An object at the answer's beginning needs no mark."""
    named: bool
    """A name and its arguments may follow the mark instead of objects."""
    new_id: Callable[[], str]


LLAMA = Form("<|python_tag|>", ";,", "", "", at_beginning=True, named=False, new_id=long_id)
MISTRAL = Form("[TOOL_CALLS]", ",", "[", "]", at_beginning=False, named=True, new_id=short_id)


class _Place(Enum):
    BEGINNING = "beginning"
    """Nothing but spaces has come."""
    CONTENT = "content"
    BETWEEN = "between"
    """Behind the mark or a call, where an object may begin."""
    NAME = "name"
    """Behind the mark; the name that stands before its arguments has not come yet."""
    HEAD = "head"
    """In an object, before its arguments."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """In an object, behind its arguments."""


class ObjectCalls:
    """A `ToolCallParser`."""

    def __init__(self, form: Form, most_calls: int | None) -> None:
        self._form = form
        self._place = _Place.BEGINNING if form.at_beginning else _Place.CONTENT
        self._held = ""
        self._pending = ""
        """What has been passed over since the mark or the last call: content, if no call follows."""
        self._opened = self._has_calls = False
        """Of the calls behind this mark."""
        self._bare = False
        """The arguments stand in no object."""
        self._brackets = Brackets()
        self._scanned = 0
        """Characters of `_held` that `_brackets` has read."""
        self._found = Findings(most_calls)

    def add(self, text: str) -> Parsed:
        self._held += text
        while _STEPS[self._place](self):
            pass
        return self._found.take()

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        match self._place:
            case _Place.BEGINNING | _Place.CONTENT | _Place.NAME | _Place.HEAD | _Place.TAIL:
                self._found.content(self._pending + held)
            case _Place.BETWEEN:
                if not self._has_calls:
                    self._found.content(self._pending + held)
            case _Place.ARGUMENTS:
                self._found.arguments(held)
        self._pending = ""
        return self._found.take()

    # Each step takes what it can from `_held`; True: another step may go on.

    def _read_beginning(self) -> bool:
        bare = self._held.lstrip()
        if not bare:
            return False
        if bare[0] == "{":
            self._begin_calls("")
        else:
            self._place = _Place.CONTENT
        return True

    def _read_content(self) -> bool:
        mark = self._form.mark
        start = self._held.find(mark)
        end = start if start >= 0 else len(self._held) - possible_beginning(self._held, mark)
        self._found.content(self._held[:end])
        self._held = self._held[end:]
        if start < 0:
            return False
        self._held = self._held[len(mark) :]
        self._begin_calls(mark)
        return True

    def _begin_calls(self, mark: str) -> None:
        self._pending, self._opened, self._has_calls = mark, not self._form.opening, False
        self._place = _Place.BETWEEN

    def _read_between(self) -> bool:
        form, bare = self._form, self._held.lstrip()
        if not bare:
            return False
        if self._opened and bare[0] == "{":
            self._place, self._brackets, self._scanned = _Place.HEAD, Brackets(), 0
            self._pass_over(len(self._held) - len(bare))
            return True
        separated = bool(self._pending.strip())
        passed = (
            bare[0] == form.opening
            if not self._opened
            else bare[0] in form.separators and self._has_calls and not separated
        )
        if passed:
            self._opened = True
            self._pass_over(len(self._held) - len(bare) + 1)
        elif bare[0] == form.closing and self._has_calls and not separated:
            self._held = bare[1:]
            self._place = _Place.CONTENT
        elif form.named and not self._opened:
            self._place = _Place.NAME
        else:
            self._give_up("")
        return True

    def _read_name(self) -> bool:
        head = _NAMED_HEAD.match(self._held)
        if head is not None:
            self._begin_call(head[1], head.end(), bare=True)
            return True
        if _NAMED_SO_FAR.fullmatch(self._held):
            return False
        self._give_up("")
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._held)
        name = text_of(head[1]) if head is not None else None
        if head is not None and name is not None:
            self._begin_call(name, head.end(), bare=False)
            return True
        self._scanned += self._brackets.read(self._held[self._scanned :])
        if not self._brackets.closed:
            return False
        body, self._held = self._held[: self._scanned], self._held[self._scanned :]
        call = whole_call(body, needs_arguments=True)
        if call is None:
            self._give_up(body)
            return True
        self._found.begin_call(*call, self._form.new_id())
        self._end_call(_Place.BETWEEN)
        return True

    def _read_arguments(self) -> bool:
        end = self._brackets.read(self._held)
        self._found.arguments(self._held[:end])
        self._held = self._held[end:]
        if not self._brackets.closed:
            return False
        if self._bare:
            self._end_call(_Place.CONTENT)
        else:
            self._place, self._brackets = _Place.TAIL, Brackets(depth=1)
        return True

    def _read_tail(self) -> bool:
        """Further members and the bracket that closes the object, which some models forget."""
        if not self._pending:
            self._held = self._held.lstrip()
            if self._held and self._held[0] not in ",}":
                self._end_call(_Place.BETWEEN)
                return True
        self._pass_over(self._brackets.read(self._held))
        if self._brackets.closed:
            self._end_call(_Place.BETWEEN)
        return self._brackets.closed

    # Calls

    def _begin_call(self, name: str, head_length: int, *, bare: bool) -> None:
        self._found.begin_call(name, "", self._form.new_id())
        self._held = self._held[head_length:]
        self._bare, self._pending = bare, ""
        self._place, self._brackets = _Place.ARGUMENTS, Brackets()

    def _end_call(self, place: _Place) -> None:
        self._pending, self._has_calls = "", True
        self._place = place

    def _pass_over(self, length: int) -> None:
        self._pending += self._held[:length]
        self._held = self._held[length:]

    def _give_up(self, taken: str) -> None:
        """What has been passed over, `taken` last, is content, and so is what follows."""
        self._found.content(self._pending + taken)
        self._pending, self._place = "", _Place.CONTENT


class LlamaCalls(ObjectCalls):
    def __init__(self, most_calls: int | None = None) -> None:
        super().__init__(LLAMA, most_calls)


class MistralCalls(ObjectCalls):
    def __init__(self, most_calls: int | None = None) -> None:
        super().__init__(MISTRAL, most_calls)


_STEPS: dict[_Place, Callable[[ObjectCalls], bool]] = {
    _Place.BEGINNING: ObjectCalls._read_beginning,
    _Place.CONTENT: ObjectCalls._read_content,
    _Place.BETWEEN: ObjectCalls._read_between,
    _Place.NAME: ObjectCalls._read_name,
    _Place.HEAD: ObjectCalls._read_head,
    _Place.ARGUMENTS: ObjectCalls._read_arguments,
    _Place.TAIL: ObjectCalls._read_tail,
}
