"""The whole engine (scheduler, prefix cache, mixed batches, overlap) gives transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from references import MODEL_FOLDER, Reference, load_references, near_tie_or_none, reference_subset

from engine.build import BuildOptions, EngineParts, build_engine
from engine.config import EngineConfig
from engine.loop import Engine
from engine.port import RequestFailed, RequestKey, SamplingParameters, Submit, TokenSampled

pytestmark = pytest.mark.model
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def parts() -> Iterator[EngineParts]:
    built = build_engine(
        BuildOptions(model=MODEL_FOLDER, max_model_len=2048, kv_cache_memory_bytes=1 << 29, linear_forms="plain")
    )
    yield built
    built.runner.close()


def run_all(parts: EngineParts, config: EngineConfig, references: list[Reference]) -> tuple[int, int]:
    """Submit all at once, run to rest, compare; returns (near-ties, prompt tokens taken from the prefix cache)."""
    engine = Engine(config, parts.runner, np.zeros(config.num_blocks, np.uint64))
    outputs: dict[str, list[int]] = {reference.name: [] for reference in references}
    for reference in references:
        sampling = SamplingParameters(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
        engine.take(Submit(RequestKey(reference.name), tuple(reference.prompt_ids), sampling))
    unfinished, cached = set(outputs), 0
    while unfinished:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokenSampled):
                outputs[event.key].append(event.token_id)
                cached += event.prompt_cached or 0
                if event.finish_reason is not None:
                    unfinished.remove(event.key)
    ties = [near_tie_or_none(outputs[reference.name], reference) for reference in references]
    return sum(tie is not None for tie in ties), cached


@pytest.mark.timeout(600)
def test_all_golden_prompts_at_once_give_the_reference_tokens(
    parts: EngineParts, capsys: pytest.CaptureFixture[str]
) -> None:
    references = load_references()
    ties, _ = run_all(parts, parts.config, references)
    with capsys.disabled():
        print(f"\n{len(references)} golden prompts in one batch, {ties} near-ties")  # noqa: T201
    assert ties <= max(1, len(references) // 8)


def test_a_pool_too_small_for_all_and_small_chunks_give_the_reference_tokens(parts: EngineParts) -> None:
    """Preemption by recompute, prefixes shared by doubled prompts, chunks that are no multiple of a block."""
    references = [reference for reference in reference_subset() if len(reference.prompt_ids) < 400][:5]
    doubled = references + [replace(reference, name=reference.name + " again") for reference in references]
    config = replace(parts.config, num_blocks=26, max_num_seqs=8, max_num_batched_tokens=37, max_model_len=400)
    ties, _ = run_all(parts, config, doubled)
    assert ties <= 2


def test_a_repeated_prompt_is_taken_from_the_cache_and_gives_the_reference_tokens(parts: EngineParts) -> None:
    reference = next(r for r in reference_subset() if len(r.prompt_ids) > 100)
    config = replace(parts.config, max_num_seqs=1)
    ties, cached = run_all(parts, config, [reference, replace(reference, name="again")])
    assert ties <= 2
    assert cached >= len(reference.prompt_ids) // config.block_size * config.block_size - config.block_size
