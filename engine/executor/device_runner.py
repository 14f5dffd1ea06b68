"""Runs plans on a GPU in the order of their launches: everything of a step is enqueued on one stream and nothing waits for it.

    stage (one copy) -> attention plans -> forward (eager, piecewise or captured) -> draw -> copy of the tokens -> `done`

Called from the engine thread alone. Sampled tokens feed back on the device. The host may run LAUNCHED_LIMIT steps ahead; a
further launch waits for the oldest. A result is read when its step's event has come; until then its `StepSlot` belongs to it.
Where the plan's KV leaves, an event stands behind the last write into each layer group, before that layer's attention, so that
the KV of early layers can be copied while later ones run. A whole graph has none.

Must not know: requests, schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.decode_plan import DecodePlan, DecodeShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.invariant import DeviceAttention
from engine.executor.runner import LAUNCHED_LIMIT, StepFailed
from engine.graphs.buffers import BufferLimits, StagedStep, StepBuffers, StepSlot
from engine.graphs.capture import FullGraph, GraphCapture, PiecewiseGraphs
from engine.graphs.select import Choice, Costs, GraphSelector, Mode, Reason, StepDescriptor
from engine.kv_cache.device_storage import DeviceKvStorage
from engine.model.device_decoder import Activations, DeviceDecoder
from engine.sampling.device_sampler import Logprobs, sample_on_device
from engine.step import SamplingRows, StepPlan, StepResult
from engine.trial_steps import trial_step_in_one_block

MEASURED_REPLAYS = 5
COMPUTE_PRIORITY = -1
"""Above the default of 0, on which transfers copy."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warm-up left and took. A set of piecewise graphs of one size counts once."""

    graphs: int
    capture_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Attention:
    """A step's attention plans: its first `decodes` rows, then chunks, of which some have a past, or none has."""

    decodes: int
    decode_plan: DecodePlan | None
    prefill_plan: Any
    prompt_plan: Any


class DeviceRunner:
    """A `Runner`. `warm_up` must have run before the first launch; it chooses what is captured."""

    def __init__(
        self, decoder: DeviceDecoder, attention: DeviceAttention, storage: DeviceKvStorage, limits: BufferLimits
    ) -> None:
        device = storage.memory.device
        self._decoder = decoder
        self._attention = attention
        self._storage = storage
        self._block_size = storage.layout.block_size
        self._dummy = (storage.dummy_block, storage.layout.block_size)
        self._limits = limits
        self._stream = torch.cuda.Stream(device, priority=COMPUTE_PRIORITY)  # type: ignore[no-untyped-call]
        self._buffers = StepBuffers(limits, self._block_size, storage.dummy_block, device)
        self._layer_group = storage.layout.layer_group
        layer_groups = storage.layout.layers // self._layer_group
        self._slots = [StepSlot(limits, layer_groups) for _ in range(LAUNCHED_LIMIT)]
        self._launches = 0
        self._full: dict[DecodeShape, FullGraph] = {}
        self._piecewise: dict[int, PiecewiseGraphs] = {}
        self._failure: BaseException | None = None
        self.selector = GraphSelector(Costs())
        self.warm = WarmUp(0, 0, 0.0)

    def launch(self, plan: StepPlan) -> LaunchedOnDevice:
        decodes = leading_decodes(plan)
        step = StepDescriptor(plan.tokens, decodes, all_draw=len(plan.sample_tokens) == plan.rows)
        return self.launch_as(plan, self.selector.choose(step))

    def launch_as(self, plan: StepPlan, choice: Choice) -> LaunchedOnDevice:
        """Run the plan in the mode and bucket of `choice`, which must be correct for it."""
        slot = self._slots[self._launches % LAUNCHED_LIMIT]
        self._await(slot.done)
        self._launches += 1
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            padded = choice.bucket if choice.mode is not Mode.EAGER else plan.tokens
            rows = padded if choice.mode is Mode.FULL else plan.rows
            staged = self._buffers.stage(plan, slot, padded, rows)
            if len(plan.block_copies):
                self._storage.copy_blocks(plan.block_copies)
            logits = self._forward(plan, slot, staged, choice)
            samples = len(plan.sample_tokens)
            logprobs = None
            if samples:
                tokens, best = self._buffers.sampled[:samples], self._buffers.best_logits[:samples]
                previous = self._buffers.sampled
                logprobs = sample_on_device(
                    logits[:samples],
                    plan.sampling,
                    staged.sampling,
                    previous,
                    tokens,
                    best,
                    invariant=self._decoder.invariant,
                )
                slot.tokens[:samples].copy_(tokens, non_blocking=True)
                slot.best_logits[:samples].copy_(best, non_blocking=True)
            host_logprobs = _to_host(logprobs)
            slot.done.record(self._stream)
        tells_layers = plan.kv_leaves and choice.mode is not Mode.FULL
        return LaunchedOnDevice(self, slot, self._launches, plan.number, plan.sampling, host_logprobs, tells_layers)

    def _forward(self, plan: StepPlan, slot: StepSlot, staged: StagedStep, choice: Choice) -> torch.Tensor:
        """Logits; of no row when nothing is drawn."""
        if choice.mode is Mode.FULL:
            decode_plan = self._attention.plan_decode(slot.decode_plan, staged.page_start)
            return self._full[decode_plan.shape].replay(decode_plan)
        attention = self._plan_attention(plan, slot, staged)
        if choice.mode is Mode.PIECEWISE:
            graphs = self._piecewise[choice.bucket]
            for layer, graph in enumerate(graphs.graphs):
                graph.replay()
                self._mark_written(layer, plan, slot)
                self._attend(layer, attention, plan.tokens, staged, graphs.state)
            return self._logits(graphs.state, staged.sampling.sample_tokens)
        state = self._decoder.activations(plan.tokens)
        self._decoder.open(staged.tokens, state)
        for layer in range(self._decoder.layers):
            self._mark_written(layer, plan, slot)
            self._attend(layer, attention, plan.tokens, staged, state)
            if layer + 1 < self._decoder.layers:
                self._decoder.between(layer, staged.tokens, state)
        return self._logits(state, staged.sampling.sample_tokens)

    def _mark_written(self, layer: int, plan: StepPlan, slot: StepSlot) -> None:
        """All that writes KV of layers up to this one has been launched, and nothing behind it."""
        group, rest = divmod(layer + 1, self._layer_group)
        if plan.kv_leaves and not rest and group <= len(slot.written):
            slot.written[group - 1].record(self._stream)

    def _logits(self, state: Activations, sample_tokens: torch.Tensor) -> torch.Tensor:
        """Nothing behind the last attention is computed for a step that draws nothing."""
        return self._decoder.close(state, sample_tokens) if len(sample_tokens) else state.hidden[:0]

    def _plan_attention(self, plan: StepPlan, slot: StepSlot, staged: StagedStep) -> Attention:
        decodes = leading_decodes(plan)
        decode_plan: DecodePlan | None = None
        prefill_plan = prompt_plan = None
        if decodes:
            page_start = staged.page_start[: decodes + 1]
            decode_plan = self._attention.plan_decode(slot.decode_plan, page_start)
        if decodes < plan.rows:
            query_start = plan.query_start[decodes:] - plan.query_start[decodes]
            contexts = plan.context_lengths[decodes:]
            whole = (np.diff(query_start) == contexts).all()
            if whole and isinstance(self._attention, FlashInferAttention):
                prompt_plan = self._attention.plan_prompts(slot.prefill_plan, query_start)
            else:
                page_start = staged.page_start[decodes : plan.rows + 1]
                prefill_plan = self._attention.plan_prefill(slot.prefill_plan, query_start, page_start, contexts)
        return Attention(decodes, decode_plan, prefill_plan, prompt_plan)

    def _attend(self, layer: int, attention: Attention, tokens: int, staged: StagedStep, state: Activations) -> None:
        kernels, decodes = self._attention, attention.decodes
        heads = state.projected.view(len(state.projected), -1, kernels.head_dim)
        queries = heads[:, : kernels.heads]
        attended = state.attended.view(len(state.attended), kernels.heads, kernels.head_dim)
        if attention.decode_plan is not None:
            kernels.decode(layer, attention.decode_plan, queries[:decodes], staged.pages, attended[:decodes])
        chunks = slice(decodes, tokens)
        if attention.prefill_plan is not None:
            kernels.prefill(layer, attention.prefill_plan, queries[chunks], staged.pages, attended[chunks])
        if attention.prompt_plan is not None:
            assert isinstance(kernels, FlashInferAttention)
            kernels.prompts(attention.prompt_plan, heads[chunks], attended[chunks])

    def warm_up(self, full: Sequence[int], piecewise: Sequence[int], eager: Sequence[int]) -> list[str]:
        """Compile every kernel, capture the given sizes, and measure each mode at them. Returns a report, one line each."""
        begun = time.perf_counter()
        slot = self._slots[0]
        capture = GraphCapture(self._decoder, self._attention, self._buffers, self._stream)
        asked = self._prompt(1)
        asked = replace(asked, sampling=replace(asked.sampling, logprobs=np.ones(1, np.int32)))
        self.launch_as(asked, Choice(Mode.EAGER, 1, Reason.NONE)).result()
        for tokens in sorted(eager):
            self.launch_as(self._prompt(tokens), Choice(Mode.EAGER, tokens, Reason.NONE)).result()
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info()[0]
        for rows in sorted(full, reverse=True):
            for longest in (1, self._limits.row_blocks * self._block_size):
                with torch.inference_mode(), torch.cuda.stream(self._stream):
                    staged = self._buffers.stage(self._decodes(rows, longest), slot, rows, rows)
                    decode_plan = self._attention.plan_decode(slot.decode_plan, staged.page_start)
                    if decode_plan.shape not in self._full:
                        self._full[decode_plan.shape] = capture.full(decode_plan)
                    self._stream.synchronize()  # the next plan is written where this one is read
        for tokens in sorted(piecewise, reverse=True):
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._buffers.stage(self._prompt(tokens), slot, tokens, 1)
                self._piecewise[tokens] = capture.piecewise(tokens)
        torch.cuda.empty_cache()
        capture_bytes = free_bytes - torch.cuda.mem_get_info()[0]
        costs = Costs(
            full={rows: self._measure(self._decodes(rows), Choice(Mode.FULL, rows, Reason.NONE)) for rows in full},
            piecewise={
                tokens: self._measure(self._prompt(tokens), Choice(Mode.PIECEWISE, tokens, Reason.NONE))
                for tokens in piecewise
            },
            eager={
                tokens: self._measure(self._prompt(tokens), Choice(Mode.EAGER, tokens, Reason.NONE)) for tokens in eager
            },
            eager_decode={
                rows: self._measure(self._decodes(rows), Choice(Mode.EAGER, rows, Reason.NONE))
                for rows in (min(full), max(full))
            },
        )
        self.selector = GraphSelector(costs)
        self.warm = WarmUp(len(self._full) + len(self._piecewise), capture_bytes, time.perf_counter() - begun)
        return [
            f"graphs: {len(self._full)} full and {len(self._piecewise)} piecewise, {capture_bytes >> 20} MiB, "
            f"{self.warm.seconds:.1f} s",
            *(f"{name} {size}: {seconds * 1e3:.2f} ms" for name, sizes in costs.by_mode() for size, seconds in sizes),
        ]

    def largest_step(self) -> StepPlan:
        """As many tokens and rows as ever; every row draws, and wants log probabilities."""
        limits = self._limits
        longest = limits.row_blocks * self._block_size
        rest, counts = max(0, limits.tokens - limits.rows), []
        for _ in range(limits.rows):
            more = min(rest, longest - 1)
            counts.append(1 + more)
            rest -= more
        plan = trial_step_in_one_block(0, counts, counts, *self._dummy)
        return replace(plan, sampling=replace(plan.sampling, logprobs=np.ones(limits.rows, np.int32)))

    def _measure(self, plan: StepPlan, choice: Choice) -> float:
        """Seconds of the step, in a row with others of its kind: what it costs an overlapped loop."""
        self.launch_as(plan, choice).result()
        seconds = []
        for _ in range(MEASURED_REPLAYS):
            begun = time.perf_counter()
            launched = [self.launch_as(plan, choice) for _ in range(2)]
            launched[-1].result()
            seconds.append((time.perf_counter() - begun) / 2)
        return sorted(seconds)[len(seconds) // 2]

    def _decodes(self, rows: int, longest: int = 1) -> StepPlan:
        """A batch of decodes that reads and writes nobody's block; the context of one has `longest` positions."""
        return trial_step_in_one_block(0, [1] * rows, [longest] + [1] * (rows - 1), *self._dummy)

    def _prompt(self, tokens: int) -> StepPlan:
        return trial_step_in_one_block(0, [tokens], [tokens], *self._dummy)

    def take_result(self, launched: LaunchedOnDevice) -> StepResult:
        slot = self._slot_of(launched)
        self._await(slot.done)
        samples = len(launched.sampling.temperature)
        tokens, best = slot.tokens[:samples].numpy().copy(), slot.best_logits[:samples].numpy()
        if self._failure is None and not np.isfinite(best).all():
            self._failure = StepFailed(f"step {launched.number} gave logits that are not finite")
            raise self._failure
        if self._failure is not None:
            raise StepFailed(f"step {launched.number} follows a failed step") from self._failure
        return _result(tokens, launched.sampling, launched.logprobs)

    def layers_written(self, launched: LaunchedOnDevice) -> Iterator[int]:
        """See `LaunchedStep`. Raises StepFailed."""
        slot = self._slot_of(launched)
        for group, written in enumerate(slot.written, start=1):
            self._await(written)
            yield group * self._layer_group

    def _slot_of(self, launched: LaunchedOnDevice) -> StepSlot:
        assert self._launches - launched.launch < LAUNCHED_LIMIT, f"step {launched.number} is asked about too late"
        return launched.slot

    def _await(self, event: torch.cuda.Event) -> None:
        """Raises StepFailed when the device does not work any more: CUDA's errors stay."""
        try:
            event.synchronize()
        except RuntimeError as error:
            self._failure = error
            raise StepFailed(f"the GPU failed: {error}") from error

    def close(self) -> None:
        """After a failed step nothing is waited for: the device may not answer any more."""
        if self._failure is None:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class LaunchedOnDevice:
    runner: DeviceRunner
    slot: StepSlot
    launch: int
    number: int
    sampling: SamplingRows
    logprobs: Logprobs | None
    """In pinned memory, there once the slot's event has come."""
    tells_layers: bool

    def layers_written(self) -> Iterator[int]:
        return self.runner.layers_written(self) if self.tells_layers else iter(())

    def result(self) -> StepResult:
        return self.runner.take_result(self)


def leading_decodes(plan: StepPlan) -> int:
    """Rows of one token before the first row of several."""
    several = np.diff(plan.query_start) != 1
    return int(np.argmax(several)) if several.any() else plan.rows


def _to_host(logprobs: Logprobs | None) -> Logprobs | None:
    """Copies in pinned memory, on their way."""
    if logprobs is None:
        return None

    def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    chosen = copy(logprobs.chosen)
    assert chosen is not None
    return Logprobs(chosen, copy(logprobs.top_token_ids), copy(logprobs.top_logprobs))


def _result(tokens: npt.NDArray[np.int64], rows: SamplingRows, logprobs: Logprobs | None) -> StepResult:
    """Log probabilities spread over all rows; those that want none hold NaN (and token 0)."""
    if logprobs is None:
        return StepResult(tokens)
    wanted = rows.logprobs >= 0
    chosen = np.full(len(tokens), np.nan, np.float32)
    chosen[wanted] = logprobs.chosen.numpy()
    if logprobs.top_token_ids is None or logprobs.top_logprobs is None:
        return StepResult(tokens, chosen)
    top_logprobs = np.full((len(tokens), logprobs.top_logprobs.shape[1]), np.nan, np.float32)
    top_token_ids = np.zeros(top_logprobs.shape, np.int64)
    top_logprobs[wanted], top_token_ids[wanted] = logprobs.top_logprobs.numpy(), logprobs.top_token_ids.numpy()
    return StepResult(tokens, chosen, top_token_ids, top_logprobs)
