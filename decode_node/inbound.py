"""One attempt of one request on a decode node, as a pure table: (state, event) -> (state, effects).

Its place: `service` feeds it what the router, the engine and the transfers say about one attempt and carries out the
effects. It alone decides where the KV of the history comes from: the prefill nodes of the list in their order, each
asked for what is still missing, then this node's own engine.

Invariants:
- Blocks reserved for the attempt stay until its transfer has ended: the engine is told to start or to forget the
  request only when no scatter on them can be open (`StartEngine` and `ForgetInEngine` follow `Committed` or `TransferEnded`).
- A token is emitted once, in order of position; the token at the end of the history is taken from a prefill node only
  while that position is unset, and is never drawn again.
- After `EmitEnd`, or an `EmitToken` with a finish reason, nothing more is emitted.

Must not know: clocks, sockets, protobuf, tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from decode_node.inbound_events import (
    BeginTry,
    BlocksReserved,
    BlocksUnavailable,
    BlocksWanted,
    Cancelled,
    Committed,
    CountDropped,
    CountLocalPrefill,
    Effect,
    EmitEnd,
    EmitToken,
    EndTry,
    EngineFailed,
    Event,
    FirstTokenArrived,
    ForgetInEngine,
    GiveBlocks,
    RefuseBlocks,
    ReserveBlocks,
    Sampled,
    StartEngine,
    Submitted,
    SubmitToEngine,
    TransferEnded,
)
from engine.port import FinishReason
from engine.request import FinishRules
from foundation.ids import BlockId


class Phase(Enum):
    NEW = "new"
    ASKING = "asking"
    """A transfer is open and has not asked for blocks yet."""
    RESERVING = "reserving"
    """The transfer waits until the engine has reserved the blocks."""
    RECEIVING = "receiving"
    """The blocks are the transfer's."""
    RUNNING = "running"
    """The engine computes or decodes; no transfer is open."""
    ENDING = "ending"
    """Over for the router; blocks are kept until the transfer has ended."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes in one attempt. `rules` are the engine's own."""

    settled_length: int
    prefill_choices: int
    block_size: int
    rules: FinishRules
    local_reason: str = "no_prefill_node"
    """Why there is no prefill choice."""
    forks: bool = False
    """Another attempt here gets the KV of the same prompt, and the engine shares it."""

    @property
    def history_length(self) -> int:
        return self.rules.prompt_length + self.settled_length


@dataclass(frozen=True, slots=True)
class Unasked:
    """The engine holds no block for this attempt and was not asked for any."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The engine was asked and has not answered."""

    end_position: int


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks for [0, end_position) are this attempt's; KV of [0, verified) in them is proven."""

    block_ids: tuple[BlockId, ...]
    end_position: int
    verified: int


Blocks = Unasked | Awaited | Held


@dataclass(frozen=True, slots=True)
class Inbound:
    facts: Facts
    next_position: int
    phase: Phase = Phase.NEW
    try_number: int = 0
    """The transfer that is open, or was last; tries are numbered from 1 in the order of the prefill choices."""
    blocks: Blocks = Unasked()
    first_token: int | None = None
    """The token that a prefill node drew for the position after the history."""


def new_inbound(facts: Facts) -> Inbound:
    return Inbound(facts=facts, next_position=facts.history_length)


Step = tuple[Inbound, tuple[Effect, ...]]


def handle(state: Inbound, event: Event) -> Step:
    """Raises AssertionError for a pair that cannot happen: that is a bug, never an input."""
    action = TRANSITIONS.get((state.phase, type(event)))
    assert action is not None, f"{type(event).__name__} cannot happen in {state.phase.name}"
    if isinstance(event, BlocksWanted | FirstTokenArrived | Committed | TransferEnded) and (
        event.try_number != state.try_number
    ):
        return _stale(state, event)
    return action(state, event)


def _submitted(state: Inbound, event: Submitted) -> Step:
    if state.facts.forks and state.facts.prefill_choices == 0:
        return replace(state, phase=Phase.RUNNING), (SubmitToEngine(await_kv=False),)
    if state.facts.prefill_choices == 0:
        local = CountLocalPrefill(state.facts.local_reason, 0)
        return replace(state, phase=Phase.RUNNING), (local, SubmitToEngine(await_kv=False))
    asking = replace(state, phase=Phase.ASKING, try_number=1)
    return asking, (SubmitToEngine(await_kv=True), BeginTry(1))


def _blocks_wanted(state: Inbound, event: BlocksWanted) -> Step:
    match state.blocks:
        case Held():
            return _give(state, state.blocks)
        case Awaited():
            return replace(state, phase=Phase.RESERVING), ()
        case Unasked():
            awaited = Awaited(event.end_position)
            return replace(state, phase=Phase.RESERVING, blocks=awaited), (ReserveBlocks(event.end_position),)


def _reserved_early(state: Inbound, event: BlocksReserved) -> Step:
    """The try that wanted the blocks is over; the next one takes them."""
    assert isinstance(state.blocks, Awaited), state.blocks
    return replace(state, blocks=Held(event.block_ids, event.end_position, event.from_position)), ()


def _reserved(state: Inbound, event: BlocksReserved) -> Step:
    return _give(state, Held(event.block_ids, event.end_position, event.from_position))


def _give(state: Inbound, held: Held) -> Step:
    give = GiveBlocks(state.try_number, held.block_ids, held.verified, held.end_position)
    return replace(state, phase=Phase.RECEIVING, blocks=held), (give,)


def _unavailable(state: Inbound, event: BlocksUnavailable) -> Step:
    """Without blocks here no prefill node can help: the attempt fails."""
    end: Effect = EndTry(state.try_number, event.reason)
    if state.phase is Phase.RESERVING:
        end = RefuseBlocks(state.try_number, event.reason)
    return replace(state, phase=Phase.ENDING), (EmitEnd(FinishReason.FAILED, event.reason), end)


def _first_token(state: Inbound, event: FirstTokenArrived) -> Step:
    if event.token is None:
        return state, ()
    if state.first_token is not None:
        return state, (CountDropped("duplicate"),)
    position, token_id = state.next_position, event.token.token_id
    finish = state.facts.rules.reason(position, token_id)
    emit = EmitToken(position, token_id, event.token.logprob, event.token.top_logprobs, finish)
    settled = replace(state, first_token=token_id, next_position=position + 1)
    if finish is None:
        return settled, (emit,)
    return replace(settled, phase=Phase.ENDING), (emit, EndTry(state.try_number, "done"))


def _committed(state: Inbound, event: Committed) -> Step:
    return _start(state, event.verified_positions)


def _transfer_ended(state: Inbound, event: TransferEnded) -> Step:
    """Keep the proven whole blocks; get the rest from the next prefill node, or compute it here."""
    blocks = state.blocks
    if isinstance(blocks, Held):
        proven = min(event.verified_positions, blocks.end_position)
        whole_blocks = proven - proven % state.facts.block_size
        blocks = replace(blocks, verified=max(blocks.verified, whole_blocks))
    state = replace(state, blocks=blocks)
    if state.try_number < state.facts.prefill_choices:
        return replace(state, phase=Phase.ASKING, try_number=state.try_number + 1), (BeginTry(state.try_number + 1),)
    verified = blocks.verified if isinstance(blocks, Held) else 0
    recomputed = state.facts.history_length - verified if isinstance(blocks, Held) else 0
    running, effects = _start(state, verified)
    return running, (CountLocalPrefill(event.reason, recomputed), *effects)


def _start(state: Inbound, verified: int) -> Step:
    """Without a first token the last position of the history must be computed here, to draw from its logits."""
    usable = state.facts.history_length - (0 if state.first_token is not None else 1)
    return replace(state, phase=Phase.RUNNING), (StartEngine(min(verified, usable), state.first_token),)


def _sampled(state: Inbound, event: Sampled) -> Step:
    token = event.token
    assert token.position == state.next_position, f"token for {token.position}, {state.next_position} is next"
    account: tuple[int, int, int] | None = None
    if token.prompt_cached is not None:
        account = (token.prompt_cached, token.prompt_transferred or 0, token.prompt_computed or 0)
    top = tuple((entry.token_id, entry.logprob) for entry in token.top_logprobs)
    emit = EmitToken(token.position, token.token_id, token.logprob, top, token.finish_reason, account)
    phase = Phase.RUNNING if token.finish_reason is None else Phase.ENDED
    return replace(state, phase=phase, next_position=state.next_position + 1), (emit,)


def _cancelled_with_transfer(state: Inbound, event: Cancelled) -> Step:
    ending = replace(state, phase=Phase.ENDING)
    return ending, (EmitEnd(event.finish_reason, event.reason), EndTry(state.try_number, event.reason))


def _cancelled_running(state: Inbound, event: Cancelled) -> Step:
    return replace(state, phase=Phase.ENDED), (EmitEnd(event.finish_reason, event.reason), ForgetInEngine())


def _failed_with_transfer(state: Inbound, event: EngineFailed) -> Step:
    return _cancelled_with_transfer(state, Cancelled(event.reason, FinishReason.FAILED))


def _failed_running(state: Inbound, event: EngineFailed) -> Step:
    return replace(state, phase=Phase.ENDED), (EmitEnd(FinishReason.FAILED, event.reason),)


def _last_transfer_over(state: Inbound, event: Committed | TransferEnded) -> Step:
    return replace(state, phase=Phase.ENDED), (ForgetInEngine(),)


def _stale(state: Inbound, event: Event) -> Step:
    return state, (CountDropped("unknown_transfer"),)


def _ignored(state: Inbound, event: Event) -> Step:
    return state, ()


def _table() -> dict[tuple[Phase, type[Any]], Callable[[Inbound, Any], Step]]:
    """An absent pair cannot happen. `_ignored`: the engine answers what was asked before the phase changed;
    `_stale`: a transfer speaks that is open no more."""
    transferring: dict[type[Any], Callable[[Inbound, Any], Step]] = {
        Cancelled: _cancelled_with_transfer,
        FirstTokenArrived: _first_token,
        TransferEnded: _transfer_ended,
        EngineFailed: _failed_with_transfer,
    }
    stale: dict[type[Any], Callable[[Inbound, Any], Step]] = dict.fromkeys(
        (BlocksWanted, FirstTokenArrived, Committed, TransferEnded), _stale
    )
    late_answers: dict[type[Any], Callable[[Inbound, Any], Step]] = {
        BlocksReserved: _ignored,
        BlocksUnavailable: _ignored,
    }
    by_phase: dict[Phase, dict[type[Any], Callable[[Inbound, Any], Step]]] = {
        Phase.NEW: {Submitted: _submitted},
        Phase.ASKING: transferring
        | {BlocksWanted: _blocks_wanted, BlocksReserved: _reserved_early, BlocksUnavailable: _unavailable},
        Phase.RESERVING: transferring | {BlocksReserved: _reserved, BlocksUnavailable: _unavailable},
        Phase.RECEIVING: transferring | {Committed: _committed},
        Phase.RUNNING: stale
        | late_answers
        | {Cancelled: _cancelled_running, Sampled: _sampled, EngineFailed: _failed_running},
        Phase.ENDING: stale
        | late_answers
        | {
            Committed: _last_transfer_over,
            TransferEnded: _last_transfer_over,
            Cancelled: _ignored,
            EngineFailed: _ignored,
        },
        Phase.ENDED: stale | late_answers | {Cancelled: _ignored, Sampled: _ignored, EngineFailed: _ignored},
    }
    return {(phase, event): action for phase, actions in by_phase.items() for event, action in actions.items()}


TRANSITIONS = _table()
