"""The parts of an engine on a GPU, put together and warm: what `engine.build` does for a host.

Must not know: nodes, networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.attention.flashinfer import FlashInferAttention
from engine.attention.invariant import DeviceAttention, InvariantAttention
from engine.build import BuildOptions, config_of, layout_of, max_model_len_of, num_blocks_of
from engine.config import EngineConfig
from engine.executor.device_runner import DeviceRunner
from engine.graphs.buffers import BufferLimits
from engine.graphs.select import decode_buckets
from engine.kernels.invariant_product import TILINGS, Tiling, agreeing_tilings
from engine.kv_cache.device_storage import TORCH_DTYPES, DeviceKvStorage
from engine.model.config import ModelConfig, read_model_config
from engine.model.device_decoder import DeviceDecoder
from engine.model.loader import DummyTensors, FolderTensors, TensorSource, build_decoder, fingerprint_of
from engine.pool_size import profiled_pool_size, trial_blocks
from foundation.errors import ConfigurationError
from foundation.fingerprint import Fingerprint
from foundation.kv_layout import KvLayout

PIECEWISE_SIZES = (64, 128, 256, 384, 512, 640)
EAGER_SIZES = (1, 16, 64, 128, 256, 512, 1024)
"""Token counts at which prompts are measured eagerly; costs of others are interpolated."""
LAYER_GROUPS = (4, 3, 5, 2, 1)
"""Into how many groups the layers of a pool are cut, the best first."""


@dataclass(frozen=True, slots=True)
class DeviceEngineParts:
    runner: DeviceRunner
    storage: DeviceKvStorage
    model: ModelConfig
    config: EngineConfig
    fingerprint: Fingerprint
    report: tuple[str, ...]
    """What warm-up captured and measured, one line each, for the log."""

    @property
    def layout(self) -> KvLayout:
        return self.storage.layout


def build_device_engine(options: BuildOptions, device: torch.device) -> DeviceEngineParts:
    """Load, warm up and put together. Raises ConfigurationError naming the setting that is wrong."""
    model = read_model_config(options.model)
    if model.family == "toy":
        raise ConfigurationError("--model", "the toy model runs on a CPU only")
    dtype = device_dtype(options, model)
    max_model_len = max_model_len_of(options, model)
    group = options.kv_layer_group or default_layer_group(model.layers)
    layout = layout_of(replace(options, kv_layer_group=group), model, dtype)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.set_device(device)
    dummy = options.load_format == "dummy"
    source: TensorSource = DummyTensors(model, options.seed, device) if dummy else FolderTensors(options.model)
    with torch.inference_mode():
        decoder = build_decoder(model, source, TORCH_DTYPES[dtype], device, max_model_len)

    def runner_over(num_blocks: int) -> tuple[DeviceRunner, DeviceKvStorage]:
        storage = DeviceKvStorage(layout, num_blocks, device)
        limits = buffer_limits(options, max_model_len, num_blocks)
        with torch.inference_mode():
            attention: DeviceAttention
            if options.batch_invariant:
                attention = InvariantAttention(storage, model.heads, limits.rows, max_model_len, limits.tokens)
            else:
                attention = FlashInferAttention(storage, model.heads)
            decoding = DeviceDecoder(decoder, storage, max_model_len, invariant_tilings=tilings)
        return DeviceRunner(decoding, attention, storage, limits), storage

    tilings: tuple[Tiling, ...] = ()
    invariant_report = []
    if options.batch_invariant:
        with torch.inference_mode():
            tilings = agreeing_tilings(TORCH_DTYPES[dtype], device)
        invariant_report = [f"batch-invariant: {len(tilings)} of {len(TILINGS)} tilings sum alike"]
    report: list[str] = []
    if options.num_blocks is None and options.gpu_memory_utilization is not None:
        size = profiled_pool_size(options, layout, device, lambda: runner_over(trial_blocks(options))[0])
        num_blocks, report = size.num_blocks, [size.describe()]
    else:
        num_blocks = num_blocks_of(options, layout)
    if num_blocks * layout.block_size >= 2**31:
        raise ConfigurationError("--kv-cache-memory-bytes", "holds more positions than 32 bits can number")
    runner, storage = runner_over(num_blocks)
    report += invariant_report
    report += runner.warm_up(
        decode_buckets(options.max_num_seqs),
        [size for size in PIECEWISE_SIZES if size <= min(options.max_num_batched_tokens, max_model_len)],
        [size for size in EAGER_SIZES if size <= min(options.max_num_batched_tokens, max_model_len)],
    )
    config = replace(config_of(options, model, num_blocks), overlap=True, scores_prompts=False)
    kv = f"{dtype}, {invariant_name(device)}" if options.batch_invariant else dtype
    fingerprint = fingerprint_of(options.model, model, source.fingerprint(), kv)
    return DeviceEngineParts(runner, storage, model, config, fingerprint, tuple(report))


def default_layer_group(layers: int) -> int:
    """A quarter of the layers, or a near part where four do not divide them: a group's KV leaves while the next is computed, and
    each more costs a parcel's host work."""
    return layers // next(groups for groups in LAYER_GROUPS if layers % groups == 0)


def device_dtype(options: BuildOptions, model: ModelConfig) -> str:
    """`auto` takes bfloat16 for weights that are stored in float32."""
    if options.dtype == "float32":
        raise ConfigurationError("--dtype", "is float32; attention on a GPU takes bfloat16 or float16")
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if model.dtype == "float32" else model.dtype


def invariant_name(device: torch.device) -> str:
    """What nodes must share for their bits to be equal: the mode, and hardware that sums alike."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"batch-invariant on sm_{major}{minor}"


def buffer_limits(options: BuildOptions, max_model_len: int, num_blocks: int) -> BufferLimits:
    """Rows may share cached blocks, so all rows together can name more pages than there are blocks."""
    row_blocks = min(-(-max_model_len // options.block_size), num_blocks)
    return BufferLimits(
        tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        rows=options.max_num_seqs,
        row_blocks=row_blocks,
        pages=options.max_num_seqs * row_blocks,
    )
