"""Which way a step runs: eager, piecewise or as one captured graph. Pure: plain numbers in, a choice out.

First what is *correct*: a full graph holds exactly a batch of decodes, each of which draws; a piecewise graph holds every stretch
between attentions, whatever attends. What a step does beside computing (log probabilities, banned tokens, filters) happens
behind the logits, outside of any graph, so it never matters here. KV that leaves by layer group is told of between the stretches;
a full graph tells nothing before its end, which for one token of each row is soon enough.
Then what is *cheapest*: the costs measured at warm-up, by mode and bucket; eager costs are interpolated between measured sizes.

Must not know: torch, how anything is captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Mode(Enum):
    EAGER = "eager"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class StepDescriptor:
    """All that decides: `decodes` rows of one token each, then chunks with `tokens` - `decodes` tokens."""

    tokens: int
    decodes: int
    all_draw: bool
    """Every row draws a token."""

    @property
    def only_decodes(self) -> bool:
        return self.tokens == self.decodes


class Reason(Enum):
    """Why a step does not run as a full graph; `NONE` when it does."""

    NONE = "none"
    PROMPT_CHUNKS = "prompt_chunks"
    SILENT_ROWS = "silent_rows"
    NO_BUCKET = "no_bucket"
    DEARER = "dearer"


@dataclass(frozen=True, slots=True)
class Choice:
    mode: Mode
    bucket: int
    """Tokens the step is padded to; equal to its own in eager mode."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, by size: what was measured at warm-up. A missing mode or bucket cannot be chosen."""

    full: Mapping[int, float] = field(default_factory=dict)
    piecewise: Mapping[int, float] = field(default_factory=dict)
    eager: Mapping[int, float] = field(default_factory=dict)
    """Of prompts, as `piecewise`; at a few sizes: between them costs are interpolated, beyond them extrapolated."""
    eager_decode: Mapping[int, float] = field(default_factory=dict)
    """Of batches of decodes, as `full`."""

    def by_mode(self) -> Iterator[tuple[str, list[tuple[int, float]]]]:
        for name in ("full", "eager_decode", "piecewise", "eager"):
            yield name, sorted(getattr(self, name).items())


@dataclass(slots=True)
class GraphStatistics:
    """What was chosen, for `decant bench graphs` and the metrics."""

    steps: Counter[tuple[Mode, int]] = field(default_factory=Counter)
    """By mode and bucket; eager steps all count under bucket 0."""
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    tokens: int = 0
    padded_tokens: int = 0

    def copy(self) -> GraphStatistics:
        """A snapshot, which any thread may take."""
        return GraphStatistics(self.steps.copy(), self.fallbacks.copy(), self.tokens, self.padded_tokens)

    def count(self, choice: Choice, tokens: int) -> None:
        self.steps[choice.mode, 0 if choice.mode is Mode.EAGER else choice.bucket] += 1
        if choice.reason is not Reason.NONE:
            self.fallbacks[choice.reason] += 1
        self.tokens += tokens
        self.padded_tokens += choice.bucket - tokens


class GraphSelector:
    """Chooses for each step among what was captured. Never adds a bucket: random shapes cost no capture."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._full = sorted(costs.full)
        self._piecewise = sorted(costs.piecewise)
        self.statistics = GraphStatistics()

    def forget_statistics(self) -> None:
        self.statistics = GraphStatistics()

    def choose(self, step: StepDescriptor) -> Choice:
        choice = self._choose(step)
        self.statistics.count(choice, step.tokens)
        return choice

    def _choose(self, step: StepDescriptor) -> Choice:
        reason = _why_not_full(step)
        bucket = _bucket(self._full, step.tokens) if reason is Reason.NONE else None
        if reason is Reason.NONE and bucket is None:
            reason = Reason.NO_BUCKET
        if bucket is not None:
            if self.costs.full[bucket] <= interpolated(self.costs.eager_decode, step.tokens):
                return Choice(Mode.FULL, bucket, Reason.NONE)
            return Choice(Mode.EAGER, step.tokens, Reason.DEARER)
        piecewise = _bucket(self._piecewise, step.tokens)
        if piecewise is not None and self.costs.piecewise[piecewise] < interpolated(self.costs.eager, step.tokens):
            return Choice(Mode.PIECEWISE, piecewise, reason)
        return Choice(Mode.EAGER, step.tokens, reason)


def _why_not_full(step: StepDescriptor) -> Reason:
    if not step.only_decodes:
        return Reason.PROMPT_CHUNKS
    return Reason.NONE if step.all_draw else Reason.SILENT_ROWS


def interpolated(costs: Mapping[int, float], tokens: int) -> float:
    """Infinite where nothing was measured."""
    sizes = sorted(costs)
    if not sizes:
        return float("inf")
    above = bisect_left(sizes, tokens)
    if above == 0:
        return costs[sizes[0]]
    if above == len(sizes):
        return costs[sizes[-1]] * tokens / sizes[-1]
    low, high = sizes[above - 1], sizes[above]
    share = (tokens - low) / (high - low)
    return costs[low] * (1 - share) + costs[high] * share


def _bucket(buckets: Sequence[int], tokens: int) -> int | None:
    place = bisect_left(buckets, tokens)
    return buckets[place] if place < len(buckets) else None


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 up to 80, 16 up to 128, 32 up to 256, 64 beyond, and `max_rows` itself."""
    sizes = (1, 2, 4, *range(8, 80, 8), *range(80, 128, 16), *range(128, 256, 32), *range(256, max_rows + 1, 64))
    return tuple(sorted({size for size in sizes if size < max_rows} | {max_rows}))
