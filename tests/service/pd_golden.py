"""What is right for the toy: its own arithmetic."""

from __future__ import annotations

import random

from engine.model.toy import TOY_VOCABULARY_SIZE
from engine.model.toy_kv import toy_greedy
from foundation.kv_layout import KvLayout

TOY_LAYERS, TOY_HEADS, TOY_HEAD_DIM = 4, 6, 4
TOY_LAYOUT = KvLayout(TOY_LAYERS, TOY_HEADS, TOY_HEAD_DIM, "float32", 16)


def toy_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(TOY_VOCABULARY_SIZE - 1), k=length)


def toy_answer(history: list[int], count: int) -> list[int]:
    return toy_greedy(history, count, TOY_LAYOUT, TOY_VOCABULARY_SIZE)
