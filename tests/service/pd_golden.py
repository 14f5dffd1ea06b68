"""What is right: the toy's own arithmetic, and transformers' greedy tokens of the default model (tests/golden)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from engine.model.toy import TOY_VOCABULARY_SIZE
from engine.model.toy_kv import toy_greedy
from foundation.kv_layout import KvLayout

TOY_LAYERS, TOY_HEADS, TOY_HEAD_DIM = 4, 6, 4
TOY_LAYOUT = KvLayout(TOY_LAYERS, TOY_HEADS, TOY_HEAD_DIM, "float32", 16)
NEAR_TIE = 1e-3
"""Margin between the two best logits below which two correct float32 engines may differ."""

_GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct.json"


def toy_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(TOY_VOCABULARY_SIZE - 1), k=length)


def toy_answer(history: list[int], count: int) -> list[int]:
    return toy_greedy(history, count, TOY_LAYOUT, TOY_VOCABULARY_SIZE)


class Golden:
    def __init__(self) -> None:
        self.references: dict[str, dict[str, Any]] = {
            one["name"]: one for one in json.loads(_GOLDEN.read_text())["references"]
        }

    def prompt(self, name: str) -> list[int]:
        return list(self.references[name]["prompt_ids"])

    def of_length(self, length: int) -> str:
        return next(name for name, one in self.references.items() if len(one["prompt_ids"]) == length)

    def compare(self, name: str, tokens: list[int]) -> None:
        """Identical up to the first near-tie, which is printed."""
        expected, margins = self.references[name]["output_ids"], self.references[name]["margins"]
        for index, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)):
            if ours != theirs:
                assert margins[index] < NEAR_TIE, (
                    f"{name}, token {index}: {ours}, not {theirs} (margin {margins[index]})"
                )
                print(f"{name}: near-tie at token {index}, margin {margins[index]}")  # noqa: T201
                return
        assert len(tokens) <= len(expected), f"{name}: {len(tokens) - len(expected)} tokens too many"
