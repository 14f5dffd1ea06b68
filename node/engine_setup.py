"""From a node's options to an engine that is warm: the folder, the device, the parts, the step budget, and its KV pool as
transfers see it.

A step must last at most a quarter of the silence limit, so that a peer can tell a busy engine from a stuck one. What one token
costs is measured here, on the warm model, before anything is in the pool; `--max-num-batched-tokens` is lowered to it.

Must not know: roles, networks.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from engine.build import BuildOptions, EngineParts, build_engine
from engine.config import EngineConfig
from engine.executor.runner import ThreadRunner
from engine.grammar import Grammars
from engine.graphs.select import GraphStatistics
from engine.kv_cache.storage import KvStorage
from engine.loop import Engine
from engine.model.config import read_model_config
from engine.step import Runner, StepPlan
from engine.trial_steps import trial_step
from foundation.log import get_logger
from foundation.model_folder import resolve_model_folder, served_model_name
from foundation.registry_entry import Role
from kv_transfer.pool_copy import KvPool
from kv_transfer.staging import AnyPool
from node.devices import device_of
from node.options import DeviceKind, NodeOptions

if TYPE_CHECKING:
    from engine.build_device import DeviceEngineParts

STEPS_A_SILENCE = 4
MEASURED_TOKENS = 256
HOST_POOL_BYTES = 1 << 30
SWITCH_INTERVAL_S = 1e-4
"""On a GPU the engine's thread takes tens of microseconds at a time, and the device waits for it: it must not wait Python's
default of 5 ms for the thread that serves streams. A launch gives the interpreter up some twenty times: with 0.5 ms it took up to
11 ms of a step of 10 while KV landed at full rate."""
SELF_TEST_SLOTS = 2
"""A prefill node keeps so many beside its staging memory."""
ATTENTION_RESERVE = 1.5
"""A long context makes a token dearer than the short one that is measured."""

Parts: TypeAlias = "EngineParts | DeviceEngineParts"

log = get_logger()


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    engine: Engine
    parts: Parts
    pool: AnyPool
    config: EngineConfig
    model_id: str
    step_limit_s: float

    def graphs(self) -> GraphStatistics:
        """Of the steps that ran on a GPU since warm-up."""
        runner = self.parts.runner
        return GraphStatistics() if isinstance(runner, ThreadRunner) else runner.selector.statistics


def prepare_engine(options: NodeOptions) -> ReadyEngine:
    """Takes seconds. Raises ConfigurationError naming the setting that is wrong."""
    device = device_of(options.device, options.node_index, toy=_is_toy(options))
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    parts = _build(_build_options(options, kind), device)
    for line in parts.report:
        log.info("warm-up", choice=line)
    step_limit_s = options.silence_limit_s / STEPS_A_SILENCE
    budget = affordable_tokens(parts.runner, parts.config, step_limit_s)
    pool = _transfer_pool(parts)
    log.info("step budget", tokens=budget, asked=options.max_num_batched_tokens, step_limit_s=step_limit_s)
    shared = parts.config.max_num_batched_tokens if options.prompts_share_steps else 0
    config = replace(parts.config, max_num_batched_tokens=budget, shared_prompt_tokens=shared)
    return ReadyEngine(
        engine=Engine(config, parts.runner, parts.storage.owner_words, _grammars(options, parts)),
        parts=parts,
        pool=pool,
        config=config,
        model_id=served_model_name(options.model, options.served_model_name),
        step_limit_s=step_limit_s,
    )


def _is_toy(options: NodeOptions) -> bool:
    return read_model_config(resolve_model_folder(options.model, options.revision)).family == "toy"


def _build(options: BuildOptions, device: torch.device) -> Parts:
    if device.type == "cpu":
        return build_engine(options)
    from engine.build_device import build_device_engine  # needs Triton

    return build_device_engine(options, device)


def _transfer_pool(parts: Parts) -> AnyPool:
    storage = parts.storage
    if isinstance(storage, KvStorage):
        return KvPool(storage.layout, storage.pool_views(), storage.owner_words)
    from kv_transfer.device_copy import DevicePool
    from kv_transfer.device_staging import DeviceStaging

    return DeviceStaging(DevicePool(storage.layout, storage.memory, storage.device_owner_words))


def _grammars(options: NodeOptions, parts: Parts) -> Grammars | None:
    """None where nothing could end an answer that is complete, or where no tokenizer says what tokens are."""
    file = resolve_model_folder(options.model, options.revision) / "tokenizer.json"
    if options.role is Role.PREFILL or not parts.config.eos_token_ids or not file.is_file():
        return None
    return Grammars(file, parts.fingerprint.vocabulary_size, parts.config.eos_token_ids)


def _build_options(options: NodeOptions, kind: DeviceKind) -> BuildOptions:
    asked = options.kv_cache_memory_bytes
    staging = options.staging_on(kind)
    return BuildOptions(
        model=resolve_model_folder(options.model, options.revision),
        load_format=options.load_format,  # type: ignore[arg-type]
        seed=options.seed,
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_memory_bytes=HOST_POOL_BYTES if asked is None else asked,
        gpu_memory_utilization=options.gpu_memory_utilization if kind == "cuda" and asked is None else None,
        reserved_device_bytes=staging.staging_bytes + SELF_TEST_SLOTS * staging.slot_bytes,
        num_blocks=options.num_gpu_blocks_override,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_head_order=options.kv_head_order,  # type: ignore[arg-type]
        kv_layer_group=options.kv_layer_group,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        batch_invariant=options.batch_invariant,
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
    blocks = np.arange(-(-tokens // config.block_size), dtype=np.int32)
    return trial_step(number, [tokens], [tokens], blocks[None, :], config.block_size)
