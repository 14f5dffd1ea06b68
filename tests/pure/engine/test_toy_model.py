"""The toy model: its text is a function of its KV bytes, so every wrong byte shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from step_plans import batch_plan, greedy_rows
from tokenizers import Tokenizer

from engine.build import BuildOptions, EngineParts, build_engine
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.model.toy_kv import toy_greedy

PROMPT = [72, 101, 108, 108, 111] * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_folder(tmp_path / "toy")


def built(folder: Path, **changes: object) -> EngineParts:
    return build_engine(BuildOptions(**({"model": folder, "num_blocks": 64, "block_size": 4} | changes)))  # type: ignore[arg-type]


@pytest.fixture
def parts(folder: Path) -> Iterator[EngineParts]:
    made = built(folder)
    yield made
    made.runner.close()


def next_token(parts: EngineParts, blocks: list[int]) -> int:
    """The token after PROMPT, whose last position is computed and whose other KV is what the blocks hold."""
    plan = batch_plan(0, [([PROMPT[-1]], len(PROMPT) - 1, blocks)], parts.config.block_size)
    return int(parts.runner.launch(plan).result().token_ids[0])


def prefill(parts: EngineParts, blocks: list[int]) -> None:
    parts.runner.launch(batch_plan(0, [(PROMPT, 0, blocks)], parts.config.block_size)).result()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor_parallel_size": 3, "kv_head_order": "NHD"},
        {"tensor_parallel_size": 12, "pipeline_parallel_size": 2, "kv_layer_group": 1},
        {"pipeline_parallel_size": 4, "block_size": 7, "kv_head_order": "NHD"},
        {"dtype": "bfloat16", "tensor_parallel_size": 2},
    ],
)
def test_greedy_text_equals_the_oracle_in_every_layout(folder: Path, changes: dict[str, object]) -> None:
    parts = built(folder, **changes)
    try:
        block_size = parts.config.block_size
        blocks = [63 - 2 * i for i in range(30)]
        first = parts.runner.launch(batch_plan(0, [(PROMPT[:20], 0, blocks)], block_size, sample=[False]))
        second = parts.runner.launch(batch_plan(1, [(PROMPT[20:], 20, blocks)], block_size))
        assert first.result().token_ids.tolist() == []
        launched, tokens = second, []
        for step in range(12):
            following = parts.runner.launch(
                batch_plan(2 + step, [([0], len(PROMPT) + step, blocks)], block_size, feedback=[0])
            )
            tokens.append(int(launched.result().token_ids[0]))
            launched = following
        assert tokens == toy_greedy(PROMPT, 12, parts.layout, TOY_VOCABULARY_SIZE)
    finally:
        parts.runner.close()


def test_every_single_wrong_byte_changes_the_next_token_nearly_always(parts: EngineParts) -> None:
    """One flipped bit leaves the token as it is with probability 1/257; of 60 flips at most 3 may be lucky."""
    blocks = list(range(5, 17))
    prefill(parts, blocks)
    (pool,) = parts.storage.pool_views()
    clean = next_token(parts, blocks)
    rng = np.random.default_rng(0)
    unseen = 0
    for _ in range(60):
        block = blocks[int(rng.integers(10))]
        view = pool[0, block].reshape(-1)
        place = int(rng.integers(len(view)))
        view[place] ^= 1 << int(rng.integers(8))
        unseen += next_token(parts, blocks) == clean
        prefill(parts, blocks)
    assert unseen <= 3
    assert next_token(parts, blocks) == clean


def test_swapped_blocks_change_the_next_token(parts: EngineParts) -> None:
    blocks = list(range(5, 17))
    prefill(parts, blocks)
    swapped = [blocks[1], blocks[0], *blocks[2:]]
    assert next_token(parts, blocks) != next_token(parts, swapped)


def test_rows_of_a_mixed_batch_do_not_see_each_other(parts: EngineParts) -> None:
    other = [1, 2, 3]
    plan = batch_plan(0, [(PROMPT, 0, list(range(12))), (other, 0, [40])], 4, sampling=greedy_rows(2, [45, 3]))
    tokens = parts.runner.launch(plan).result().token_ids.tolist()
    expected = [toy_greedy(ids, 1, parts.layout, TOY_VOCABULARY_SIZE)[0] for ids in (PROMPT, other)]
    assert tokens == expected


def test_the_toy_tokenizer_gives_back_any_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("Hello, world!", "  two  spaces\n", "日本語 é ß 🙂", ""):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
