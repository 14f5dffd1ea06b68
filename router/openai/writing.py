"""A whole response as JSON: a short one at once, a long one for a thread beside the event loop.

The library writes a value without letting go of the interpreter, which with log probabilities is megabytes. So there long lists
are given to it in slices, and other threads get their turn in between.

Must not know: what stands in a response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

SLICE_ITEMS = 64


def written(value: Any) -> bytes:
    """What `json.dumps` gives; an iterator may stand for a list."""
    return json.dumps(value, default=list).encode()


def written_in_slices(value: Any) -> bytes:
    """The same, for values in which names are strings."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            items = (chain((f"{json.dumps(name)}: ",), _parts(held)) for name, held in value.items())
            yield from _enclosed("{", items, "}")
        case list() | tuple() if len(value) > SLICE_ITEMS:
            starts = range(0, len(value), SLICE_ITEMS)
            slices = ((json.dumps(value[start : start + SLICE_ITEMS])[1:-1],) for start in starts)
            yield from _enclosed("[", slices, "]")
        case list() | tuple() | Iterator():
            yield from _enclosed("[", map(_parts, value), "]")
        case _:
            yield json.dumps(value)


def _enclosed(opening: str, items: Iterator[Iterator[str] | tuple[str, ...]], closing: str) -> Iterator[str]:
    yield opening
    for number, item in enumerate(items):
        if number:
            yield ", "
        yield from item
    yield closing
