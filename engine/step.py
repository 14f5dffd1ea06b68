"""One step's plan and result: all that crosses from the scheduler to the runner and back.

Flat numpy arrays; the scheduler fills them on the engine thread, the runner reads them without a choice of its own.
A plan is launched before the previous step's tokens are known to the host, so a row may take its input token from the
previous step's samples (`feedback`).

Must not know: requests' texts, torch, sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
NO_COPIES: Int64 = np.zeros((0, 2), np.int64)
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is added to logits, or takes from them what has been said already; only of rows that ask for it.

    Everything comes from the sequence's history, so a sequence that goes on elsewhere is treated alike. Shapes: B biased
    (row, token) pairs, A rows with penalties, H tokens of all their histories.
    """

    bias_rows: Int64
    """[B] as `bias_tokens` and `bias_values`."""
    bias_tokens: Int64
    bias_values: Float32
    rows: Int64
    """[A] the rows that have penalties; as `repetition`, `presence` and `frequency`."""
    repetition: Float32
    presence: Float32
    frequency: Float32
    feedback: Int32
    """[A] index into the previous launched plan's sampled tokens of an output token that the host does not know yet, or -1."""
    history: Int64
    """[H] token ids; as `history_of` (index into `rows`) and `generated` (part of the answer, not of the prompt)."""
    history_of: Int64
    generated: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that M rows may draw; others may draw any."""

    rows: Int64
    words: Int32
    """[M, vocabulary / 32] bit i of word w: token 32 * w + i is allowed."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling of the S rows that draw a token in this step, one array a parameter, shape [S] unless said."""

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: UInt64
    choice_index: Int32
    position: Int64
    """Absolute position of the token that is drawn."""
    logprobs: Int32
    """-1: none wanted; 0: of the chosen token; n: of the n best as well."""
    banned: tuple[tuple[int, int], ...] = ()
    """(row, token id) pairs that may not be drawn: stop tokens before min_tokens is reached."""
    adjustments: Adjustments | None = None
    masks: TokenMasks | None = None


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """P of a step's tokens whose next token is known, for it is the prompt's, and whose log probability is wanted."""

    tokens: Int64
    """[P] indices into the T tokens, ascending."""
    next_token_ids: Int64
    """[P]."""
    best: int
    """So many of the best tokens as well; the largest wanted count."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A batch of R sequences with T tokens in all; row r owns tokens query_start[r] : query_start[r + 1]."""

    number: int
    token_ids: Int64
    """[T]; ignored where `feedback` is not negative."""
    feedback: Int32
    """[T]; index into the previous launched plan's sampled tokens, or -1."""
    positions: Int64
    """[T] absolute position of each token."""
    slot_mapping: Int64
    """[T] where its K and V go: block id * block_size + offset."""
    query_start: Int32
    """[R + 1]."""
    context_lengths: Int32
    """[R] positions that row r attends to, this step's own included."""
    block_tables: Int32
    """[R, max blocks] block ids in order of position, padded with 0."""
    sample_tokens: Int32
    """[S] indices into the T tokens whose logits are wanted, in row order."""
    sampling: SamplingRows
    block_copies: Int64 = field(default_factory=lambda: NO_COPIES)
    """[C, 2] (from, to) blocks whose whole KV is copied before anything else of the step; no block stands in both columns."""
    scored: ScoredTokens | None = None
    kv_leaves: bool = False
    """Some row's KV is on its way to another node: who can tells when the KV of each layer group has been written."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rows(self) -> int:
        return len(self.context_lengths)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the plan's scored tokens: the log probability and rank (1: the best) of each next token, and the best tokens."""

    logprobs: Float32
    """[P]."""
    ranks: Int64
    """[P]."""
    top_token_ids: Int64
    """[P, best]."""
    top_logprobs: Float32
    """[P, best]."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host learns of one step. `top_*` have shape [S, n] with n the largest wanted count, or are None."""

    token_ids: Int64
    logprobs: Float32 | None = None
    top_token_ids: Int64 | None = None
    top_logprobs: Float32 | None = None
    scores: TokenScores | None = None
    """Where the plan has scored tokens."""


class LaunchedStep(Protocol):
    def layers_written(self) -> Iterable[int]:
        """Wait for one layer group's KV after the other while later layers still run: yields n when that of layers [0, n) may be
        read by whoever is told. Never all layers, which only `result` proves; nothing at all where no KV leaves, or where
        nothing can be told before the end."""

    def result(self) -> StepResult:
        """Wait for this step's tokens. Steps finish in the order of their launches."""


class Runner(Protocol):
    """Owns weights and the KV pool's memory."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step behind all launched before; returns without waiting for its tokens."""

    def close(self) -> None: ...
