"""Responses in parts are the JSON that the library writes at once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.openai.writing import SLICE_ITEMS, written, written_in_slices

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES)
def test_any_value(value: Any) -> None:
    assert written(value) == written_in_slices(value) == json.dumps(value).encode()


def test_long_lists_and_what_comes_one_by_one() -> None:
    for length in (0, 1, SLICE_ITEMS, SLICE_ITEMS + 1, 3 * SLICE_ITEMS):
        items = [{"token": "é", "best": (number, None)} for number in range(length)]
        whole = json.dumps({"choices": items, "more": tuple(items)}).encode()
        for encode in (written, written_in_slices):
            assert encode({"choices": iter(items), "more": tuple(items)}) == whole
