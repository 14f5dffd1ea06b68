"""Memory at fixed addresses that steps and captured graphs read, and the way of a plan's numbers into it.

    plan --numpy--> pinned words --fetch--> staged words --unpack kernels--> token ids, positions, slots, pages

A launched step may still be reading pinned memory when the next one is planned, so that memory belongs to a `StepSlot`, of
which there are several; one is used again only after its step has finished on the device (`done`). Everything on the device
exists once: steps run in order on one stream.

Must not know: models, requests, graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.flashinfer import PLAN_BYTES, Pages
from engine.kernels.unpack import fetch_words, unpack_rows, unpack_tokens
from engine.model.device_decoder import Tokens
from engine.port import MOST_BANNED_TOKENS
from engine.sampling.noise import draw_keys
from engine.step import SamplingRows, StepPlan

Int32 = npt.NDArray[np.int32]

_WORDS_A_TOKEN = 4
_WORDS_A_ROW = 3
_WORDS_A_SAMPLE = 8
_PADDING_WORDS = 64
_MOST_END_TOKENS = 16
"""Of a model; they are banned before min_tokens like a request's own stop tokens."""
_BANNED_A_ROW = MOST_BANNED_TOKENS + _MOST_END_TOKENS


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Most tokens and rows of a step, blocks of a row, and pages of all rows together."""

    tokens: int
    rows: int
    row_blocks: int
    pages: int

    @property
    def words(self) -> int:
        """int32 words that a step's numbers can take."""
        tables = self.rows * self.row_blocks
        samples = self.rows * (_WORDS_A_SAMPLE + 2 * _BANNED_A_ROW)
        return self.tokens * _WORDS_A_TOKEN + self.rows * _WORDS_A_ROW + tables + samples + _PADDING_WORDS


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """A step's sampling on the device; `SamplingRows` describes the fields, `keys` are the bits of `draw_keys`."""

    sample_tokens: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    logprob_rows: torch.Tensor
    banned_rows: torch.Tensor
    banned_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step's numbers on the device, padded to `rows` rows and `tokens` tokens, and the host's view that plans need."""

    tokens: Tokens
    pages: Pages
    page_start: Int32
    sampling: SampleInputs


class StepSlot:
    """What one launched step reads or writes on the host. `done` is recorded behind the step's last operation; where KV leaves,
    `written[g]` behind the last write into layer group g. The last group has none: it ends with the step."""

    def __init__(self, limits: BufferLimits, layer_groups: int) -> None:
        self.words = torch.zeros(limits.words, dtype=torch.int32, pin_memory=True)
        self.host_words: Int32 = self.words.numpy()
        self.decode_plan = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.prefill_plan = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.tokens = torch.zeros(limits.rows, dtype=torch.int64, pin_memory=True)
        self.best_logits = torch.zeros(limits.rows, dtype=torch.float32, pin_memory=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.written = [torch.cuda.Event() for _ in range(layer_groups - 1)]  # type: ignore[no-untyped-call]


class StepBuffers:
    """The device's half. `sampled` [rows] holds the tokens that the last launched step drew."""

    def __init__(self, limits: BufferLimits, block_size: int, dummy_block: int, device: torch.device) -> None:
        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.limits = limits
        self._block_size = block_size
        self._dummy_block = dummy_block
        self._staged = numbers(limits.words)
        self._tokens = Tokens(numbers(limits.tokens), numbers(limits.tokens), numbers(limits.tokens))
        self._pages = Pages(numbers(limits.rows + 1), numbers(limits.rows), numbers(limits.pages))
        self.sampled = torch.zeros(limits.rows, dtype=torch.int64, device=device)
        self.best_logits = torch.zeros(limits.rows, dtype=torch.float32, device=device)

    def tokens(self, count: int) -> Tokens:
        """The first `count` tokens of any step: the same addresses every time."""
        ours = self._tokens
        return Tokens(ours.token_ids[:count], ours.positions[:count], ours.slots[:count])

    def pages(self, rows: int) -> Pages:
        ours = self._pages
        return Pages(ours.page_start[: rows + 1], ours.last_page_lengths[:rows], ours.pages)

    def stage(self, plan: StepPlan, slot: StepSlot, tokens: int, rows: int) -> StagedStep:
        """Bring the plan to the device on the current stream, padded to `tokens` tokens and `rows` rows.

        Padded rows have one position, padded tokens are stored, in the dummy block. Padding both needs a plan of single tokens.
        """
        limits = self.limits
        assert plan.tokens <= tokens <= limits.tokens, (
            f"{plan.tokens} tokens, padded to {tokens}, limit {limits.tokens}"
        )
        assert plan.rows <= rows <= limits.rows, f"{plan.rows} rows, padded to {rows}, limit {limits.rows}"
        writer = _WordWriter(slot.host_words)
        self._write_tokens(writer, plan, tokens)
        row_words = writer.end
        page_start, width = self._write_rows(writer, plan, rows)
        places = _write_sampling(writer, plan.sample_tokens, plan.sampling)
        staged = self._staged[: writer.end]
        fetch_words(slot.words[: writer.end], staged)
        ours = self._tokens
        unpack_tokens(staged, self.sampled, ours.token_ids, ours.positions, ours.slots, tokens)
        pages = self._pages
        unpack_rows(staged[row_words:], pages.page_start, pages.last_page_lengths, pages.pages, rows, width)
        return StagedStep(self.tokens(tokens), self.pages(rows), page_start, places.on(staged))

    def _write_tokens(self, writer: _WordWriter, plan: StepPlan, tokens: int) -> None:
        filler = self._dummy_block * self._block_size
        for values, padding in (
            (plan.token_ids, 0),
            (plan.feedback, -1),
            (plan.positions, 0),
            (plan.slot_mapping, filler),
        ):
            place = writer.take(tokens)
            place[: plan.tokens] = values
            place[plan.tokens :] = padding

    def _write_rows(self, writer: _WordWriter, plan: StepPlan, rows: int) -> tuple[Int32, int]:
        counts = np.ones(rows, np.int32)
        counts[: plan.rows] = -(-plan.context_lengths // self._block_size)
        page_start = np.zeros(rows + 1, np.int32)
        np.cumsum(counts, out=page_start[1:])
        assert page_start[-1] <= self.limits.pages, f"{page_start[-1]} pages, room for {self.limits.pages}"
        writer.take(rows + 1)[:] = page_start
        last = writer.take(rows)
        last[: plan.rows] = (plan.context_lengths - 1) % self._block_size + 1
        last[plan.rows :] = 1
        width = plan.block_tables.shape[1]
        table = writer.take(rows * width).reshape(rows, width)
        table[: plan.rows] = plan.block_tables
        table[plan.rows :] = self._dummy_block
        return page_start, width


class _WordWriter:
    """Hands out consecutive pieces of an array of words."""

    def __init__(self, words: Int32) -> None:
        self._words = words
        self.end = 0

    def take(self, count: int) -> Int32:
        begin, self.end = self.end, self.end + count
        assert self.end <= len(self._words), f"a step of {self.end} words, room for {len(self._words)}"
        return self._words[begin : self.end]

    def align(self, words: int) -> None:
        self.end = -(-self.end // words) * words


@dataclass(frozen=True, slots=True)
class _SamplePlaces:
    """Where the sampling of S rows begins among the staged words."""

    begin: int
    samples: int
    logprob_rows: int
    banned: int

    def on(self, staged: torch.Tensor) -> SampleInputs:
        place, samples = self.begin, self.samples

        def words(count: int) -> torch.Tensor:
            nonlocal place
            place += count
            return staged[place - count : place]

        keys = words(2 * samples).view(torch.int64)
        return SampleInputs(
            keys=keys,
            sample_tokens=words(samples),
            temperature=words(samples).view(torch.float32),
            top_k=words(samples),
            top_p=words(samples).view(torch.float32),
            min_p=words(samples).view(torch.float32),
            logprob_rows=words(self.logprob_rows),
            banned_rows=words(self.banned),
            banned_tokens=words(self.banned),
        )


def _write_sampling(writer: _WordWriter, sample_tokens: Int32, rows: SamplingRows) -> _SamplePlaces:
    samples = len(sample_tokens)
    wanted = np.flatnonzero(rows.logprobs >= 0)
    banned = np.array(rows.banned, np.int32).reshape(-1, 2)
    assert len(banned) <= samples * _BANNED_A_ROW, f"{len(banned)} banned tokens for {samples} rows"
    writer.align(2)
    places = _SamplePlaces(writer.end, samples, len(wanted), len(banned))
    writer.take(2 * samples).view(np.uint64)[:] = draw_keys(rows.seed, rows.choice_index, rows.position)
    writer.take(samples)[:] = sample_tokens
    writer.take(samples).view(np.float32)[:] = rows.temperature
    writer.take(samples)[:] = rows.top_k
    writer.take(samples).view(np.float32)[:] = rows.top_p
    writer.take(samples).view(np.float32)[:] = rows.min_p
    writer.take(len(wanted))[:] = wanted
    writer.take(len(banned))[:] = banned[:, 0]
    writer.take(len(banned))[:] = banned[:, 1]
    return places
