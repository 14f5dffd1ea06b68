"""What an open loop asks, and when: lengths, arrivals and prompts, all from seeds. Pure.

Must not know: clocks, sockets, models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

CONVERSATION_FILE = Path(__file__).parent / "conversation_lengths.json"


@dataclass(frozen=True, slots=True)
class Shape:
    prompt_tokens: int
    output_tokens: int


class Lengths(Protocol):
    @property
    def name(self) -> str: ...

    def draw(self, generator: np.random.Generator) -> Shape: ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.shape.prompt_tokens}/{self.shape.output_tokens}"

    def draw(self, generator: np.random.Generator) -> Shape:
        return self.shape


class ConversationLengths:
    """Lengths of real conversations, from a table of quantiles: one of 20 equally frequent ranges of prompt lengths, then the
    answer's length among that range's own deciles, uniform within each. `scale` shrinks both, for small machines.
    """

    def __init__(self, file: Path = CONVERSATION_FILE, scale: float = 1.0) -> None:
        table = json.loads(file.read_text())
        self.name = "conversation" if scale == 1.0 else f"conversation x {scale:g}"
        self._scale = scale
        self._contexts: list[int] = table["context_tokens"]
        self._generated: list[list[int]] = table["generated_tokens"]
        assert len(self._contexts) == len(self._generated) + 1, "one range of prompt lengths lies between two edges"

    def draw(self, generator: np.random.Generator) -> Shape:
        row = int(generator.integers(len(self._generated)))
        context = generator.uniform(self._contexts[row], self._contexts[row + 1])
        quantiles = self._generated[row]
        place = int(generator.integers(len(quantiles) - 1))
        generated = generator.uniform(quantiles[place], quantiles[place + 1])
        return Shape(max(1, round(context * self._scale)), max(2, round(generated * self._scale)))


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    shape: Shape
    prompt_seed: int


def poisson_arrivals(rate: float, seconds: float, lengths: Lengths, seed: int, start_s: float = 0.0) -> list[Arrival]:
    """Requests a second with exponential gaps, in [start_s, start_s + seconds)."""
    assert rate > 0, f"a rate of {rate}"
    generator = np.random.default_rng(seed)
    arrivals, at_s = [], start_s + generator.exponential(1 / rate)
    while at_s < start_s + seconds:
        arrivals.append(Arrival(at_s, lengths.draw(generator), int(generator.integers(2**31))))
        at_s += generator.exponential(1 / rate)
    return arrivals


def prompt_of(tokens: int, seed: int, vocabulary_size: int) -> list[int]:
    """Random ids without the last one, which ends an answer."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, vocabulary_size - 1, tokens).tolist()
    return drawn
