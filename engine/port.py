"""Everything that crosses the border of the engine thread: plain data, no tensors, no sockets.

A node's asyncio thread posts `Command`s; the engine thread takes them between steps and answers with `EngineEvent`s,
all tokens of one step in one list. Nobody else touches scheduler, pool or model.

How one request uses it:

- alone on a node:     Submit(GENERATE) ... TokenSampled* (the last one carries finish_reason)
                       with prompt_logprobs PromptScored* come before the first of them
- on a prefill node:   Submit(PREFILL_ONLY), PrefillReserved, (KvLayersComputed*, KvComputed)*, TokenSampled (the first token),
                       ReleaseKv; where all KV is cached, nothing is computed or drawn: Submit, PrefillReserved, ReleaseKv
- on a decode node:    Submit(AWAIT_KV), ReserveKv, KvReserved | KvUnavailable, then StartFromKv, TokenSampled*
- its further choices: Submit(GENERATE, fork_of) ... TokenSampled*

Must not know: torch, UCX, gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from foundation.ids import BlockId

RequestKey = NewType("RequestKey", str)
"""Names a request inside one engine; the node chooses it (an AttemptId on D, a TransferId on P, as text)."""


MOST_BANNED_TOKENS = 512
"""Stop tokens and bad words of one request together: each may be banned in each step, and a step has room for so many a row."""


class Mode(Enum):
    GENERATE = "generate"
    PREFILL_ONLY = "prefill_only"
    AWAIT_KV = "await_kv"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling of one request; checked by the router, so values here are in range. Zero temperature is greedy.

    max_tokens and min_tokens count every output token, those in `Submit.settled` included.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: no logprobs; 0: of the chosen token; n: of the n best as well."""
    prompt_logprobs: int | None = None
    """The same of the prompt's own tokens, with GENERATE: then no cached KV is taken, for each position's logits are wanted."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each token once."""

    grammar: str = ""
    """What the answer must follow, in llguidance's form; then min_tokens is 0 and ignore_eos False. A prefill node has none."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else may be drawn; empty: anything."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not stand in the answer: the last token of each is banned where the others have come."""

    @property
    def penalizes(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. `settled` tokens are history: they follow the prompt and are never resampled.

    A key names at most one live request: one that has neither ended, been cancelled nor been released.
    What can never be served ends at once with RequestFailed.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    sampling: SamplingParameters
    mode: Mode = Mode.GENERATE
    settled: tuple[int, ...] = ()
    choice_index: int = 0
    fork_of: RequestKey | None = None
    """Another choice of the same prompt, with GENERATE. As soon as the KV of the prompt stands in the blocks of that request,
    this one reads them too; if that one ends or gives them up before, the prompt is computed here as any other."""


@dataclass(frozen=True, slots=True)
class ReserveKv:
    """Reserve, in one step or not at all, every block for positions [0, end_position) of an AWAIT_KV request.

    Cached prefix blocks are referenced, the rest allocated. It waits its turn until blocks are free; Cancel or
    StartFromKv(computed_positions=0) ends the wait.

    A second one for blocks already reserved (the next try, with another prefill node) is answered at once with the same
    blocks; `computed_positions` says how much of them the earlier try has proven.
    """

    key: RequestKey
    end_position: int
    computed_positions: int = 0


@dataclass(frozen=True, slots=True)
class StartFromKv:
    """KV of positions [0, computed_positions) stands in the reserved blocks; the engine computes whatever is missing.

    `first_token`, when given, is the settled token at position len(prompt) + len(settled); it is reported (once more, as
    TokenSampled) only if it ends the request. With computed_positions == 0 and nothing reserved this is a plain local prefill.
    No write into the reserved blocks may be open any more.
    """

    key: RequestKey
    computed_positions: int
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """The transfer of a PREFILL_ONLY request is over and its last gather has finished: its blocks may be cached or reused."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget the request at the end of the current step; blocks are freed once no launched step can touch them.

    For AWAIT_KV and PREFILL_ONLY requests the caller guarantees that no gather or scatter on its blocks is open.
    Unknown keys are ignored: the request may just have ended.
    """

    key: RequestKey


Command = Submit | ReserveKv | StartFromKv | ReleaseKv | Cancel


@dataclass(frozen=True, slots=True)
class PrefillReserved:
    """P has every block of this prompt. KV of [0, cached_positions) is in them already; if that is all, no event follows.

    `owner_words[i]` is what storage.owner_words[block_ids[i]] must read as long as the block is this request's.
    """

    key: RequestKey
    block_ids: tuple[BlockId, ...]
    owner_words: tuple[int, ...]
    cached_positions: int


@dataclass(frozen=True, slots=True)
class KvComputed:
    """KV of positions [0, computed_positions) has been written and may be gathered."""

    key: RequestKey
    computed_positions: int


@dataclass(frozen=True, slots=True)
class KvLayersComputed:
    """KV of layers [0, end_layer) of positions [0, computed_positions) may be gathered, while later layers of the same step still
    run; of the positions before that step all layers have been written. Never all layers: that the step has ended well is
    what KvComputed says, and RequestFailed may follow instead."""

    key: RequestKey
    computed_positions: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class KvReserved:
    """D has every block for [0, end_position); KV of [0, from_position) is in them already (whole blocks)."""

    key: RequestKey
    block_ids: tuple[BlockId, ...]
    from_position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class KvUnavailable:
    """The request can never have its blocks here. It still waits for StartFromKv or Cancel."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """One token; `position` counts from the first prompt token. With the first token of a request its prompt account
    (where the KV of its history came from, in tokens) is given."""

    key: RequestKey
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_cached: int | None = None
    prompt_transferred: int | None = None
    prompt_computed: int | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the prompt's tokens from `position` on, at least 1: nothing stands before the first token.

    A prompt is scored in runs that follow each other, each position once, before the first TokenSampled."""

    key: RequestKey
    position: int
    logprobs: tuple[float, ...]
    """[P] of the prompt's own tokens."""
    ranks: tuple[int, ...]
    """[P] how many tokens are at least as likely, the prompt's own included."""
    top_token_ids: tuple[int, ...] = ()
    """[P * n] as `top_logprobs`: of each position the n best tokens, the best first."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended without a further token. Reasons are names, not sentences (`prompt_too_long`, `engine_error`)."""

    key: RequestKey
    reason: str


EngineEvent = (
    PrefillReserved
    | KvLayersComputed
    | KvComputed
    | KvReserved
    | KvUnavailable
    | PromptScored
    | TokenSampled
    | RequestFailed
)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot, replaced whole after each step, so that any thread may read it without waiting for the engine."""

    steps: int = 0
    """Steps that have settled."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_in_use: int = 0
    blocks_total: int = 0
    has_work: bool = False
    """A step runs or can be launched: `steps` must advance. False while all that is left waits for a command."""
    step_tokens: int = 0
    """Tokens that all settled steps have computed."""
    tokens_per_second: float = 0.0
    """How fast steps that hold prompts have been of late; 0: none has been yet."""
    preemptions: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    """Steps in which somebody had to wait, by reason."""
    failed: str | None = None
    """Why the engine thread ended, when it did; every request has got RequestFailed(engine_error)."""
