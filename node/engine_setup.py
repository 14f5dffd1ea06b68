"""From a node's options to an engine that is warm: the folder, the parts, the step budget.

A step must last at most a quarter of the silence limit, so that a peer can tell a busy engine from a stuck one. What one token
costs is measured here, on the warm model, before anything is in the pool; `--max-num-batched-tokens` is lowered to it.

Must not know: roles, networks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from engine.build import BuildOptions, EngineParts, build_engine
from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.loop import Engine
from engine.step import Runner, SamplingRows, StepPlan
from foundation.log import get_logger
from foundation.model_folder import resolve_model_folder, served_model_name
from foundation.registry_entry import Role
from node.options import NodeOptions

STEPS_A_SILENCE = 4
MEASURED_TOKENS = 256
ATTENTION_RESERVE = 1.5
"""A long context makes a token dearer than the short one that is measured."""

log = get_logger()


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    engine: Engine
    parts: EngineParts
    config: EngineConfig
    model_id: str
    step_limit_s: float


def prepare_engine(options: NodeOptions) -> ReadyEngine:
    """Takes seconds. Raises ConfigurationError naming the setting that is wrong."""
    parts = build_engine(_build_options(options))
    for line in parts.report:
        log.info("warm-up", choice=line)
    step_limit_s = options.silence_limit_s / STEPS_A_SILENCE
    budget = affordable_tokens(parts.runner, parts.config, step_limit_s)
    log.info("step budget", tokens=budget, asked=options.max_num_batched_tokens, step_limit_s=step_limit_s)
    shared = parts.config.max_num_batched_tokens if options.prompts_share_steps else 0
    config = replace(parts.config, max_num_batched_tokens=budget, shared_prompt_tokens=shared)
    return ReadyEngine(
        engine=Engine(config, parts.runner, parts.storage.owner_words, _grammars(options, parts)),
        parts=parts,
        config=config,
        model_id=served_model_name(options.model, options.served_model_name),
        step_limit_s=step_limit_s,
    )


def _grammars(options: NodeOptions, parts: EngineParts) -> Grammars | None:
    """None where nothing could end an answer that is complete, or where no tokenizer says what tokens are."""
    file = resolve_model_folder(options.model, options.revision) / "tokenizer.json"
    if options.role is Role.PREFILL or not parts.config.eos_token_ids or not file.is_file():
        return None
    return Grammars(file, parts.fingerprint.vocabulary_size, parts.config.eos_token_ids)


def _build_options(options: NodeOptions) -> BuildOptions:
    return BuildOptions(
        model=resolve_model_folder(options.model, options.revision),
        load_format=options.load_format,  # type: ignore[arg-type]
        seed=options.seed,
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        num_blocks=options.num_gpu_blocks_override,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_head_order=options.kv_head_order,  # type: ignore[arg-type]
        kv_layer_group=options.kv_layer_group,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
    )


def affordable_tokens(runner: Runner, config: EngineConfig, step_limit_s: float) -> int:
    """How many tokens a step may hold: at least one for each sequence, at most what was asked for."""
    tokens = min(MEASURED_TOKENS, config.max_num_batched_tokens, config.capacity_positions, config.max_model_len)
    seconds = min(_seconds_of_a_prefill(runner, config, number, tokens) for number in range(2))
    affordable = int(step_limit_s / (seconds / tokens * ATTENTION_RESERVE))
    return max(config.max_num_seqs, min(config.max_num_batched_tokens, affordable))


def _seconds_of_a_prefill(runner: Runner, config: EngineConfig, number: int, tokens: int) -> float:
    begun = time.perf_counter()
    runner.launch(_one_prefill(config, number, tokens)).result()
    return time.perf_counter() - begun


def _one_prefill(config: EngineConfig, number: int, tokens: int) -> StepPlan:
    """One row of `tokens` tokens in the pool's first blocks, which nobody owns yet."""
    blocks = -(-tokens // config.block_size)
    one = np.ones(1, np.int32)
    return StepPlan(
        number=number,
        token_ids=np.zeros(tokens, np.int64),
        feedback=np.full(tokens, -1, np.int32),
        positions=np.arange(tokens, dtype=np.int64),
        slot_mapping=np.arange(tokens, dtype=np.int64),
        query_start=np.array([0, tokens], np.int32),
        context_lengths=tokens * one,
        block_tables=np.arange(blocks, dtype=np.int32)[None, :],
        sample_tokens=(tokens - 1) * one,
        sampling=SamplingRows(
            temperature=np.zeros(1, np.float32),
            top_k=0 * one,
            top_p=np.ones(1, np.float32),
            min_p=np.zeros(1, np.float32),
            seed=np.zeros(1, np.uint64),
            choice_index=0 * one,
            position=np.array([tokens], np.int64),
            logprobs=-one,
        ),
    )
