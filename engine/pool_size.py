"""How many blocks a GPU's KV pool gets: what a share of the memory leaves beside everything else a node keeps there.

The largest step that may ever run is run once, over a pool of just enough blocks, and its peak is read from the allocator:
weights, buffers and workspaces are counted, not estimated. What the allocator does not see (the CUDA context, kernels, captured
graphs) is a fixed reserve: reading it off the card's free memory would count a neighbour that starts at the same time.

Must not know: nodes, transfers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.build import BuildOptions
from engine.executor.device_runner import DeviceRunner
from engine.graphs.select import Choice, Mode, Reason
from foundation.errors import ConfigurationError
from foundation.kv_layout import KvLayout

CONTEXT_BYTES = 1 << 30
"""A CUDA context with the modules of all kernels takes about 0.6 GiB."""

GRAPHS_BYTES = 3 << 29
"""44 sets of graphs of an 8B shape took 1.0 to 1.3 GiB."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    pool_bytes: int
    share_bytes: int
    weights_bytes: int
    """All that lives as long as the engine, but for the pool."""
    peak_bytes: int
    """What the largest step took beyond that."""

    def describe(self) -> str:
        share, weights, peak, pool = (
            f"{value / (1 << 30):.2f}"
            for value in (self.share_bytes, self.weights_bytes, self.peak_bytes, self.pool_bytes)
        )
        return f"KV pool: {pool} GiB in {self.num_blocks} blocks (share {share}, weights {weights}, largest step {peak} GiB)"


def trial_blocks(options: BuildOptions) -> int:
    """Enough for the longest row of one step."""
    return -(-options.max_num_batched_tokens // options.block_size) + 1


def profiled_pool_size(
    options: BuildOptions, layout: KvLayout, device: torch.device, trial: Callable[[], DeviceRunner]
) -> PoolSize:
    """`trial` makes a runner over `trial_blocks` blocks beside weights that are loaded. Raises ConfigurationError when the share
    holds no pool, or is not free."""
    assert options.gpu_memory_utilization is not None
    weights_bytes, peak_bytes = _measured(trial, device)
    weights_bytes -= (trial_blocks(options) + 1) * layout.block_bytes
    _, total_bytes = torch.cuda.mem_get_info(device)
    share_bytes = int(total_bytes * options.gpu_memory_utilization)
    kept_bytes = weights_bytes + peak_bytes + CONTEXT_BYTES + GRAPHS_BYTES + options.reserved_device_bytes
    num_blocks = (share_bytes - kept_bytes) // layout.block_bytes
    size = PoolSize(num_blocks, num_blocks * layout.block_bytes, share_bytes, weights_bytes, peak_bytes)
    if num_blocks < 1:
        raise ConfigurationError(
            "--gpu-memory-utilization",
            f"is {options.gpu_memory_utilization}, {share_bytes >> 20} MiB of this GPU; weights, slots and one full step take "
            f"{kept_bytes >> 20} MiB, so no KV block would fit",
        )
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if size.pool_bytes > free_bytes:
        raise ConfigurationError(
            "--gpu-memory-utilization",
            f"is {options.gpu_memory_utilization}, a KV pool of {size.pool_bytes >> 20} MiB, but {free_bytes >> 20} MiB of this "
            "GPU are free; two nodes on one GPU share it (0.4 each, say)",
        )
    return size


def _measured(trial: Callable[[], DeviceRunner], device: torch.device) -> tuple[int, int]:
    """Bytes that stay, the trial's pool among them, and bytes that the largest step took beyond them."""
    runner = trial()
    torch.cuda.synchronize(device)
    stays_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    plan = runner.largest_step()
    runner.launch_as(plan, Choice(Mode.EAGER, plan.tokens, Reason.NONE)).result()
    peak_bytes = torch.cuda.max_memory_allocated(device) - stays_bytes
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return stays_bytes, peak_bytes
