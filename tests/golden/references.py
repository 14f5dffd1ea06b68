"""The golden references, which of them a run takes, and what "the same tokens" means.

Two correct engines may differ where the two best logits are as close as rounding. So outputs are equal when they are identical
up to the first position whose reference margin is a near-tie; such positions are returned so that a test prints and counts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ALL_ASKED = os.environ.get("GOLDEN") == "all"
ONLY_WITH_ALL = pytest.mark.skipif(not ALL_ASKED, reason="GOLDEN=all runs it")
"""For what takes minutes with the real model, and has a quicker counterpart that always runs."""

NEAR_TIE_MARGIN = 1e-3
"""Margin of the two best float32 logits under which rounding may decide."""

FILE = Path(__file__).parent / "smollm2-135m-instruct.json"
MODEL_FOLDER = Path(os.environ.get("DECANT_CACHE", "~/.cache/decant")).expanduser() / "models" / "SmolLM2-135M-Instruct"

SUBSET = (
    *("plain-02", "plain-07", "plain-11", "chat-02", "chat-06", "chat-log"),
    *("exact-15-02", "exact-16-03", "exact-17-04", "exact-33-15", "exact-129-05", "exact-300-07"),
)


@dataclass(frozen=True, slots=True)
class Reference:
    name: str
    chat: bool
    text: str | None
    """What a user would write for these ids, or None when no text tokenizes to them."""
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]
    output_text: str
    finish_reason: str


def load_references() -> list[Reference]:
    """12 of the 64, or all of them when the environment says GOLDEN=all."""
    return all_references() if ALL_ASKED else reference_subset()


def all_references() -> list[Reference]:
    return [Reference(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["references"]]


def reference_subset() -> list[Reference]:
    references = all_references()
    subset = [reference for reference in references if reference.name in SUBSET]
    assert len(subset) == len(SUBSET), "a name of SUBSET is not among the references"
    return subset


def near_tie_or_none(output_ids: Sequence[int], reference: Reference) -> int | None:
    """None when the output is the reference; else the position of the near-tie at which they part.

    Raises AssertionError when they part anywhere else.
    """
    pairs = zip(output_ids, reference.output_ids, strict=False)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        assert len(output_ids) == len(reference.output_ids), (
            f"{reference.name}: {len(output_ids)} tokens, {len(reference.output_ids)} expected"
        )
        return None
    assert reference.margins[first] < NEAR_TIE_MARGIN, (
        f"{reference.name}: token {first} is {output_ids[first]}, not {reference.output_ids[first]}, "
        f"with a margin of {reference.margins[first]}"
    )
    return first
