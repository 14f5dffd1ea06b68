"""The runner alone, driven by the simplest driver, gives transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from references import MODEL_FOLDER, ONLY_WITH_ALL, Reference, near_tie_or_none, reference_subset
from serial_driver import generate

from engine.build import BuildOptions, EngineParts, build_engine

pytestmark = [pytest.mark.model, ONLY_WITH_ALL]
MAX_TOKENS = 32


def scattered_blocks(parts: EngineParts, positions: int) -> list[int]:
    """Blocks in no order at all: every third one, from the end."""
    count = -(-positions // parts.config.block_size)
    return [parts.storage.num_blocks - 1 - 3 * i for i in range(count)]


def outputs(parts: EngineParts, references: list[Reference], chunk: int) -> dict[str, int]:
    """Near-ties by name of reference; anything else that differs fails."""
    ties = {}
    for reference in references:
        blocks = scattered_blocks(parts, len(reference.prompt_ids) + MAX_TOKENS + 1)
        tokens = generate(
            parts.runner,
            reference.prompt_ids,
            MAX_TOKENS,
            blocks,
            parts.config.block_size,
            chunk,
            parts.config.eos_token_ids,
        )
        if (position := near_tie_or_none(tokens, reference)) is not None:
            ties[reference.name] = position
    return ties


@pytest.fixture(scope="module")
def parts() -> Iterator[EngineParts]:
    built = build_engine(BuildOptions(model=MODEL_FOLDER, max_model_len=2048, kv_cache_memory_bytes=1 << 29))
    yield built
    built.runner.close()


@pytest.mark.timeout(600)
def test_the_runner_gives_the_reference_tokens_of_golden_prompts(
    parts: EngineParts, capsys: pytest.CaptureFixture[str]
) -> None:
    references = reference_subset()
    ties = outputs(parts, references, chunk=512)
    with capsys.disabled():
        print(f"\n{len(references)} golden prompts, near-ties at {ties or 'none'}")  # noqa: T201
    assert len(ties) <= len(references) // 8


def test_shards_other_blocks_and_small_chunks_give_the_same_tokens() -> None:
    options = BuildOptions(
        model=MODEL_FOLDER,
        max_model_len=1024,
        num_blocks=200,
        block_size=32,
        tensor_parallel_size=3,
        pipeline_parallel_size=3,
        kv_layer_group=5,
        kv_head_order="NHD",
        linear_forms="plain",
    )
    built = build_engine(options)
    try:
        assert len(built.storage.shards) == 9
        short = [reference for reference in reference_subset() if len(reference.prompt_ids) < 300][:4]
        assert len(outputs(built, short, chunk=24)) <= 1
    finally:
        built.runner.close()
