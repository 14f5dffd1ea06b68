"""One row at a time, in Python and float64, written from the definitions: the oracle of `sampler`.

It also gives the margin of the two best scores, by which a test tells a near-tie from a wrong draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    """SplitMix64's finalizer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def noise(seed: int, choice_index: int, position: int, token_id: int, stream: int = 0) -> float:
    """Gumbel noise of one token; see `engine.sampling.noise` for the algorithm."""
    golden = 0x9E3779B97F4A7C15
    key = stream
    for word in (seed, choice_index, position):
        key = mix(((key ^ (word & MASK)) + golden) & MASK)
    bits = mix((key + (token_id + 1) * golden) & MASK)
    uniform = ((bits >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


@dataclass(frozen=True, slots=True)
class Row:
    """Sampling of one row; the fields are those of `engine.step.SamplingRows` and `engine.step.Adjustments`."""

    temperature: float
    seed: int = 0
    choice_index: int = 0
    position: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()
    """Only penalties look at it, and at the answer."""
    answer: tuple[int, ...] = ()


def adjusted(logits: Sequence[float], row: Row) -> list[float]:
    """Logits with bias added and penalties taken off, by OpenAI's formula and, for repetition, by that of CTRL (Keskar and
    others, 2019), as Hugging Face and vLLM have it."""
    values = [float(value) for value in logits]
    for token, bias in row.bias:
        values[token] += bias
    for token in {*row.prompt, *row.answer}:
        values[token] = values[token] / row.repetition if values[token] > 0 else values[token] * row.repetition
    for token in set(row.answer):
        values[token] -= row.frequency * row.answer.count(token) + row.presence
    return values


def kept_tokens(scaled: Sequence[float], row: Row) -> list[int]:
    """Token ids that survive min-p, top-k and top-p, in this order; ties with the last survivor survive."""
    finite = [token for token, value in enumerate(scaled) if value > -math.inf]
    best = max(scaled)
    kept = [token for token in finite if math.exp(scaled[token] - best) >= row.min_p]
    if 0 < row.top_k < len(scaled):
        ranked = sorted((scaled[token] for token in kept), reverse=True)
        least = ranked[min(row.top_k, len(ranked)) - 1]
        kept = [token for token in kept if scaled[token] >= least]
    if row.top_p < 1:
        total = sum(math.exp(scaled[token] - best) for token in kept)
        mass, least = 0.0, math.inf
        for value in sorted((scaled[token] for token in kept), reverse=True):
            if least < math.inf and mass >= row.top_p:
                break
            mass, least = mass + math.exp(value - best) / total, value
        kept = [token for token in kept if scaled[token] >= least]
    return kept


def scores(logits: Sequence[float], row: Row) -> dict[int, float]:
    """Score of each token that may be drawn; the greatest wins, and of equal ones the lowest id."""
    allowed = [-math.inf if token in row.banned else value for token, value in enumerate(adjusted(logits, row))]
    if row.temperature == 0:
        return dict(enumerate(allowed))
    scaled = [value / row.temperature for value in allowed]
    return {
        token: scaled[token] + noise(row.seed, row.choice_index, row.position, token)
        for token in kept_tokens(scaled, row)
    }


def draw(logits: Sequence[float], row: Row) -> tuple[int, float]:
    """The token, and the margin of the two best scores (infinite when only one token is left)."""
    ranked = sorted(scores(logits, row).items(), key=lambda item: (-item[1], item[0]))
    margin = ranked[0][1] - ranked[1][1] if len(ranked) > 1 else math.inf
    return ranked[0][0], margin
