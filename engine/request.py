"""One request inside the engine: its history, what it holds, and the rules by which it ends.

A request's blocks are owned through `blocks` alone; arrays elsewhere are copies for speed.
Its history is prompt, settled tokens and every token drawn since: recompute after preemption needs nothing else.

Must not know: torch, pools, other requests.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.grammar import Grammar
from engine.port import FinishReason, Mode, RequestKey, SamplingParameters, Submit
from foundation.ids import BlockId


class Stage(Enum):
    """Where a request stands. The comment names what it holds."""

    WAITING = "waiting"  # nothing; wants blocks and a seat in the batch
    FORKING = "forking"  # nothing; the KV of its prompt comes to another request
    AWAITING = "awaiting"  # nothing; AWAIT_KV before ReserveKv
    RESERVING = "reserving"  # nothing; AWAIT_KV, wants blocks
    RESERVED = "reserved"  # blocks that a transfer writes: not to be preempted
    READY = "ready"  # blocks; wants a seat
    RUNNING = "running"  # blocks and a seat
    HELD = "held"  # blocks that a transfer reads: not to be preempted
    CLOSED = "closed"  # nothing, for ever


@dataclass(frozen=True, slots=True)
class FinishRules:
    """When a sequence ends. A node that learns a token from elsewhere asks the same rules."""

    prompt_length: int
    max_length: int
    """Tokens, prompt included, after which nothing more is drawn."""
    min_tokens: int
    stop_token_ids: frozenset[int]

    def reason(self, position: int, token_id: int) -> FinishReason | None:
        """Why the sequence ends with this token at this position (counted from the first prompt token), or None."""
        if token_id in self.stop_token_ids and position - self.prompt_length >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if position + 1 >= self.max_length else None


def finish_rules(prompt_length: int, sampling: SamplingParameters, config: EngineConfig) -> FinishRules:
    """max_tokens and min_tokens count every output token, those settled by an earlier attempt included."""
    eos = () if sampling.ignore_eos else config.eos_token_ids
    return FinishRules(
        prompt_length=prompt_length,
        max_length=min(prompt_length + sampling.max_tokens, config.max_sequence_length),
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
    )


@dataclass(slots=True, eq=False)
class PromptAccount:
    """Where the KV of the history that the request came with came from, in tokens."""

    cached: int
    transferred: int
    computed: int


@dataclass(slots=True, eq=False)
class Request:
    key: RequestKey
    arrival: int
    """Counts submits; who arrived earlier is served earlier and preempted later."""
    mode: Mode
    sampling: SamplingParameters
    choice_index: int
    rules: FinishRules
    history: array[int]
    stage: Stage
    given_length: int
    """Prompt and settled tokens."""
    seat: int = -1
    blocks: list[BlockId] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Chained hashes of the history's whole blocks, as far as they have been needed."""
    computed: int = 0
    """Positions whose KV stands in `blocks`, as of taking the seat."""
    cached: int = 0
    """Positions that the prefix cache provided when the blocks were taken."""
    reserve_end: int = 0
    """End position of a reservation that waits its turn."""
    fork_of: RequestKey | None = None
    """Whose KV of the same prompt is to be shared; None once it is, or never will be."""
    grammar: Grammar | None = None
    """What the answer must follow; always that of the whole history, or behind it."""
    allowed_words: npt.NDArray[np.int32] | None = None
    """Which tokens may be drawn, as a mask has them, where a list says so and has been looked at."""
    scored: int = 0
    """Positions of the prompt whose log probabilities have been reported or are not wanted."""
    account: PromptAccount | None = None
    """Set with the first KV, taken by the first token that is reported."""
    accounted: bool = False

    @property
    def may_be_preempted(self) -> bool:
        """Whether recompute can replace what it holds. A prefill node's KV may have been offered already."""
        return self.mode is not Mode.PREFILL_ONLY and self.stage in (Stage.RUNNING, Stage.READY)

    @property
    def unscored(self) -> bool:
        """Whether log probabilities of its prompt are still wanted: then every position must be computed here."""
        return self.scored < self.rules.prompt_length


def open_request(command: Submit, arrival: int, config: EngineConfig, grammar: Grammar | None = None) -> Request:
    scores = command.mode is Mode.GENERATE and command.sampling.prompt_logprobs is not None
    fork_of = None if scores else command.fork_of  # the KV of another says nothing of its own tokens
    stage = Stage.WAITING
    if command.mode is Mode.AWAIT_KV:
        stage = Stage.AWAITING
    elif fork_of is not None:
        stage = Stage.FORKING
    return Request(
        key=command.key,
        arrival=arrival,
        mode=command.mode,
        sampling=command.sampling,
        choice_index=command.choice_index,
        rules=finish_rules(len(command.prompt), command.sampling, config),
        history=array("q", (*command.prompt, *command.settled)),
        stage=stage,
        given_length=len(command.prompt) + len(command.settled),
        fork_of=fork_of,
        grammar=grammar,
        scored=1 if scores else len(command.prompt),
    )


def refusal(command: Submit, config: EngineConfig) -> str | None:
    """Why this request can never be served here; None when it can."""
    length = len(command.prompt) + len(command.settled)
    if not command.prompt:
        return "prompt_empty"
    if length >= config.max_model_len:
        return "prompt_too_long"
    if length > config.capacity_positions:
        return "prompt_exceeds_kv_cache"
    if len(command.settled) >= command.sampling.max_tokens:
        return "nothing_to_generate"
    if command.sampling.prompt_logprobs is not None and not config.scores_prompts:
        return "prompt_logprobs_not_offered"
    return None if _something_may_be_drawn(command.sampling, config) else "nothing_allowed"


def _something_may_be_drawn(sampling: SamplingParameters, config: EngineConfig) -> bool:
    """At every position: a row without any token that it may draw would break its step for everybody."""
    if not sampling.allowed_token_ids:
        return True
    never = {word[-1] for word in sampling.bad_words}
    if sampling.min_tokens:
        never.update(sampling.stop_token_ids, () if sampling.ignore_eos else config.eos_token_ids)
    return not never.issuperset(sampling.allowed_token_ids)
