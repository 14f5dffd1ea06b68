"""Runs plans in the order of their launches on one thread of its own: the CPU's counterpart of a CUDA stream.

The engine thread plans step N + 1 while this thread computes step N; sampled tokens feed back inside this thread, so a plan may
name tokens that the host has not seen. A step that raises fails that step's `result()`, and every later one's: after a
failure the pool's contents are in doubt.

Must not know: requests, schedulers.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import AttentionBackend
from engine.executor.inputs import step_inputs
from engine.kv_cache.storage import KvStorage
from engine.model.decoder import Decoder
from engine.sampling.prompt_scores import Scores, score
from engine.sampling.sampler import Sampled, sample
from engine.step import StepPlan, StepResult

LAUNCHED_LIMIT = 4
"""Plans that may wait; a further launch waits for the first of them. The scheduler keeps at most two in flight."""


class StepFailed(RuntimeError):
    """A step, or one before it, could not be computed."""


class StepProgram(Protocol):
    """Computes one plan. Called from the executor thread only, in launch order."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Launched:
    future: Future[StepResult]

    def layers_written(self) -> tuple[int, ...]:
        """The program has no events between layers."""
        return ()

    def result(self) -> StepResult:
        return self.future.result()


class ThreadRunner:
    """A `Runner` over any `StepProgram`."""

    def __init__(self, program: StepProgram, threads: int = 1) -> None:
        """`threads`: of the tensor library, for work that this thread starts (OpenMP's setting is each thread's own)."""
        self._program = program
        self._threads = threads
        self._plans: queue.Queue[tuple[StepPlan, Future[StepResult]] | None] = queue.Queue(LAUNCHED_LIMIT)
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="executor", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Launched:
        assert not self._closed, "launch after close"
        future: Future[StepResult] = Future()
        self._plans.put((plan, future))
        return Launched(future)

    def close(self) -> None:
        """Finish what was launched, then end the thread."""
        if not self._closed:
            self._closed = True
            self._plans.put(None)
            self._thread.join()

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        while (item := self._plans.get()) is not None:
            plan, future = item
            try:
                if self._failure is not None:
                    raise StepFailed(f"step {plan.number} follows a failed step") from self._failure
                future.set_result(self._program.run(plan))
            except BaseException as error:  # the task's root: handed to whoever waits for the step
                self._failure = self._failure or error
                future.set_exception(error)


class DecoderProgram:
    """Forward pass and sampling of one plan: the whole mixed batch at once."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, device: torch.device, storage: KvStorage | None = None
    ) -> None:
        """`storage`: the pool behind `attention`, for plans that copy blocks."""
        self._storage = storage
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self._previous_tokens: torch.Tensor | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if len(plan.block_copies):
            assert self._storage is not None, "a plan copies blocks of a pool that was not given"
            self._storage.copy_blocks(plan.block_copies)
        sampled, scores = self._compute(plan, zero_unread=False)
        if not _all_finite(sampled, scores):
            # Unread memory behind a context (a former tenant's, or a transfer that was refused) may hold NaNs, and NaN times
            # weight zero is NaN. Once more without them: storing the same keys and values again changes nothing.
            sampled, scores = self._compute(plan, zero_unread=True)
            if not _all_finite(sampled, scores):
                raise StepFailed(f"step {plan.number} gave logits that are not finite")
        self._previous_tokens = sampled.token_ids
        return StepResult(
            token_ids=sampled.token_ids.cpu().numpy(),
            logprobs=_host(sampled.logprobs),
            top_token_ids=_host(sampled.top_token_ids),
            top_logprobs=_host(sampled.top_logprobs),
            scores=scores.to_host() if scores is not None else None,
        )

    def _compute(self, plan: StepPlan, zero_unread: bool) -> tuple[Sampled, Scores | None]:
        inputs = step_inputs(plan, self._previous_tokens, self._device)
        attention = self._attention.prepare(plan, zero_unread)
        decoder, samples = self._decoder, len(plan.sample_tokens)
        hidden = decoder.hidden(inputs.token_ids, inputs.positions, attention, inputs.wanted_tokens)
        sampled = sample(decoder.head(hidden[:samples]), plan.sampling, self._previous_tokens)
        if plan.scored is None:
            return sampled, None
        scored = hidden[samples:]
        next_token_ids = torch.from_numpy(plan.scored.next_token_ids).to(self._device)
        vocabulary = decoder.config.vocabulary_size
        scores = score(lambda begin, end: decoder.head(scored[begin:end]), next_token_ids, vocabulary, plan.scored.best)
        return sampled, scores


def _all_finite(sampled: Sampled, scores: Scores | None) -> bool:
    return bool(sampled.best_logits.isfinite().all()) and (scores is None or scores.sound)


def _host(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.cpu().numpy()
