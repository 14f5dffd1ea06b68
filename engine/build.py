"""From a model folder and a node's settings to the parts of an engine: the one place where they are put together.

A node calls `build_engine`, makes its `Engine` from `config` and `runner`, and gives `storage` and `fingerprint` to its
transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.attention.paged import PagedAttention
from engine.config import EngineConfig
from engine.executor.runner import DecoderProgram, StepProgram, ThreadRunner
from engine.kv_cache.storage import KvStorage
from engine.model.config import ModelConfig, read_model_config
from engine.model.layers import choose_forms
from engine.model.loader import DummyTensors, FolderTensors, TensorSource, build_decoder, fingerprint_of
from engine.model.toy import ToyProgram, toy_weights_fingerprint
from foundation.errors import ConfigurationError
from foundation.fingerprint import Fingerprint
from foundation.kv_layout import DTYPE_BYTES, HeadOrder, KvDtype, KvLayout


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a node's settings say about its engine; names are those of the command line."""

    model: Path
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    """Of the random weights of load format `dummy`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    """None: as long as the model is exact."""
    block_size: int = 16
    kv_cache_memory_bytes: int = 1 << 30
    num_blocks: int | None = None
    """Instead of `kv_cache_memory_bytes`."""
    gpu_memory_utilization: float | None = None
    """On a GPU, instead of `kv_cache_memory_bytes`: the pool gets what this share of the memory leaves (`engine.pool_size`)."""
    reserved_device_bytes: int = 0
    """Part of that share which somebody else here will take: slots of transfers."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    overlap: bool = True
    kv_head_order: HeadOrder = "HND"
    kv_layer_group: int | None = None
    """Layers that lie together in a block; None: all of a pipeline stage, on a GPU about a quarter (`engine.build_device`)."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    batch_invariant: bool = False
    """On a GPU: a token's bits do not depend on what shares its step, nor on how its history was computed."""
    threads: int = 1
    linear_forms: Literal["measured", "plain"] = "measured"
    linear_copy_bytes: int = 1 << 30
    """Memory for second copies of weights in another order, where that is faster."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    runner: ThreadRunner
    storage: KvStorage
    model: ModelConfig
    config: EngineConfig
    fingerprint: Fingerprint
    report: tuple[str, ...]
    """What warm-up chose, one line each, for the log."""

    @property
    def layout(self) -> KvLayout:
        return self.storage.layout


def build_engine(options: BuildOptions) -> EngineParts:
    """Load, warm up and put together. Takes seconds. Raises ConfigurationError naming the setting that is wrong."""
    if options.batch_invariant:
        raise ConfigurationError(
            "--batch-invariant",
            "needs a GPU: on a CPU products are computed in the form that is fastest for their rows",
        )
    model = read_model_config(options.model)
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    max_model_len = max_model_len_of(options, model)
    layout = layout_of(options, model, dtype)
    storage = KvStorage(layout, num_blocks_of(options, layout))
    config = config_of(options, model, storage.num_blocks)
    report: list[str] = []
    if model.family == "toy":
        program: StepProgram = ToyProgram(storage, model.vocabulary_size)
        weights = toy_weights_fingerprint(model)
    else:
        program, weights, report = _decoder_program(options, model, storage, max_model_len)
    return EngineParts(
        runner=ThreadRunner(program, options.threads),
        storage=storage,
        model=model,
        config=config,
        fingerprint=fingerprint_of(options.model, model, weights, dtype),
        report=tuple(report),
    )


def config_of(options: BuildOptions, model: ModelConfig, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len_of(options, model),
        enable_prefix_caching=options.enable_prefix_caching,
        overlap=options.overlap,
        eos_token_ids=model.eos_token_ids,
    )


def max_model_len_of(options: BuildOptions, model: ModelConfig) -> int:
    if options.max_model_len is None:
        return model.max_positions
    if not 1 <= options.max_model_len <= model.max_positions:
        raise ConfigurationError(
            "--max-model-len", f"is {options.max_model_len}; this model takes from 1 to {model.max_positions}"
        )
    return options.max_model_len


def layout_of(options: BuildOptions, model: ModelConfig, dtype: str) -> KvLayout:
    kv_dtype: KvDtype = dtype  # type: ignore[assignment]
    return KvLayout(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        block_size=options.block_size,
        head_order=options.kv_head_order,
        layer_group=options.kv_layer_group or model.layers,
        tensor_parallel=options.tensor_parallel_size,
        pipeline_parallel=options.pipeline_parallel_size,
    )


def num_blocks_of(options: BuildOptions, layout: KvLayout) -> int:
    replicas = max(1, layout.tensor_parallel // layout.kv_heads)
    blocks = options.num_blocks or options.kv_cache_memory_bytes // (layout.block_bytes * replicas)
    if blocks < 1:
        raise ConfigurationError(
            "--kv-cache-memory-bytes",
            f"is {options.kv_cache_memory_bytes}; one block of {layout.block_size} positions takes {layout.block_bytes}",
        )
    return blocks


def _decoder_program(
    options: BuildOptions, model: ModelConfig, storage: KvStorage, max_model_len: int
) -> tuple[DecoderProgram, str, list[str]]:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[storage.layout.dtype]
    assert dtype.itemsize == DTYPE_BYTES[storage.layout.dtype]
    dummy = options.load_format == "dummy"
    source: TensorSource = DummyTensors(model, options.seed) if dummy else FolderTensors(options.model)
    with torch.inference_mode():
        decoder = build_decoder(model, source, dtype, device, max_model_len)
        report: list[str] = []
        if options.linear_forms == "measured":
            report = choose_forms(decoder.linears(), options.linear_copy_bytes, dtype, device)
    program = DecoderProgram(decoder, PagedAttention(storage, model.heads, dtype), device, storage)
    return program, source.fingerprint(), report
