"""The life of one attempt on a decode node: the whole table, then the walks that matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node import inbound_events as on
from decode_node.inbound import TRANSITIONS, Awaited, Facts, Held, Inbound, Phase, handle, new_inbound
from engine.port import FinishReason, RequestKey, TokenSampled
from engine.request import FinishRules
from foundation.ids import BlockId
from kv_transfer.port import SettledToken

EOS = 2
RULES = FinishRules(prompt_length=40, max_length=50, min_tokens=0, stop_token_ids=frozenset({EOS}))
FACTS = Facts(settled_length=3, prefill_choices=2, block_size=16, rules=RULES)
HISTORY = FACTS.history_length
BLOCKS = (BlockId(4), BlockId(7), BlockId(1))


def sampled(position: int, finish: FinishReason | None = None) -> on.Sampled:
    return on.Sampled(TokenSampled(RequestKey("r/1"), position, 100 + position, finish))


def run(state: Inbound, *events: on.Event) -> tuple[Inbound, list[on.Effect]]:
    effects: list[on.Effect] = []
    for event in events:
        state, new = handle(state, event)
        effects += new
    return state, effects


SUBMITTED = on.Submitted()
WANTED = on.BlocksWanted(1, HISTORY)
RESERVED = on.BlocksReserved(BLOCKS, 16, HISTORY)
TOKEN = on.FirstTokenArrived(1, SettledToken(77, -0.5))
COMMITTED = on.Committed(1, HISTORY)
LOST = on.TransferEnded(1, "peer_lost", 35)
CANCELLED = on.Cancelled("client_gone")

PATHS: dict[Phase, tuple[on.Event, ...]] = {
    Phase.NEW: (),
    Phase.ASKING: (SUBMITTED,),
    Phase.RESERVING: (SUBMITTED, WANTED),
    Phase.RECEIVING: (SUBMITTED, WANTED, RESERVED),
    Phase.RUNNING: (SUBMITTED, WANTED, RESERVED, COMMITTED),
    Phase.ENDING: (SUBMITTED, WANTED, RESERVED, CANCELLED),
    Phase.ENDED: (SUBMITTED, WANTED, RESERVED, CANCELLED, LOST),
}
EVENTS: dict[type, on.Event] = {
    on.Submitted: SUBMITTED,
    on.Cancelled: CANCELLED,
    on.BlocksWanted: WANTED,
    on.FirstTokenArrived: TOKEN,
    on.Committed: COMMITTED,
    on.TransferEnded: LOST,
    on.BlocksReserved: RESERVED,
    on.BlocksUnavailable: on.BlocksUnavailable("larger_than_pool"),
    on.Sampled: sampled(HISTORY),
    on.EngineFailed: on.EngineFailed("engine_error"),
}
GOES_TO: dict[Phase, dict[type, Phase]] = {
    Phase.NEW: {on.Submitted: Phase.ASKING},
    Phase.ASKING: {
        on.Cancelled: Phase.ENDING,
        on.BlocksWanted: Phase.RESERVING,
        on.FirstTokenArrived: Phase.ASKING,
        on.TransferEnded: Phase.ASKING,
        on.BlocksUnavailable: Phase.ENDING,
        on.EngineFailed: Phase.ENDING,
    },
    Phase.RESERVING: {
        on.Cancelled: Phase.ENDING,
        on.FirstTokenArrived: Phase.RESERVING,
        on.TransferEnded: Phase.ASKING,
        on.BlocksReserved: Phase.RECEIVING,
        on.BlocksUnavailable: Phase.ENDING,
        on.EngineFailed: Phase.ENDING,
    },
    Phase.RECEIVING: {
        on.Cancelled: Phase.ENDING,
        on.FirstTokenArrived: Phase.RECEIVING,
        on.Committed: Phase.RUNNING,
        on.TransferEnded: Phase.ASKING,
        on.EngineFailed: Phase.ENDING,
    },
    Phase.RUNNING: {
        on.Cancelled: Phase.ENDED,
        on.BlocksWanted: Phase.RUNNING,
        on.FirstTokenArrived: Phase.RUNNING,
        on.Committed: Phase.RUNNING,
        on.TransferEnded: Phase.RUNNING,
        on.BlocksReserved: Phase.RUNNING,
        on.BlocksUnavailable: Phase.RUNNING,
        on.Sampled: Phase.RUNNING,
        on.EngineFailed: Phase.ENDED,
    },
    Phase.ENDING: {
        on.Cancelled: Phase.ENDING,
        on.BlocksWanted: Phase.ENDING,
        on.FirstTokenArrived: Phase.ENDING,
        on.Committed: Phase.ENDED,
        on.TransferEnded: Phase.ENDED,
        on.BlocksReserved: Phase.ENDING,
        on.BlocksUnavailable: Phase.ENDING,
        on.EngineFailed: Phase.ENDING,
    },
    Phase.ENDED: dict.fromkeys(
        (
            on.Cancelled,
            on.BlocksWanted,
            on.FirstTokenArrived,
            on.Committed,
            on.TransferEnded,
            on.BlocksReserved,
            on.BlocksUnavailable,
            on.Sampled,
            on.EngineFailed,
        ),
        Phase.ENDED,
    ),
}
SPECIAL = {(Phase.ASKING, on.BlocksReserved)}
"""Possible only while an earlier try's reservation is awaited: has its own test."""


def test_every_event_type_and_phase_stands_in_this_test() -> None:
    assert set(EVENTS) == set(on.EVENT_TYPES)
    assert set(PATHS) == set(GOES_TO) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event_type", on.EVENT_TYPES)
def test_each_event_in_each_phase_leads_where_the_table_says_or_is_a_bug(phase: Phase, event_type: type) -> None:
    state, _ = run(new_inbound(FACTS), *PATHS[phase])
    assert state.phase is phase
    if (phase, event_type) in SPECIAL:
        return
    goes_to = GOES_TO[phase].get(event_type)
    assert ((phase, event_type) in TRANSITIONS) == (goes_to is not None)
    if goes_to is None:
        with pytest.raises(AssertionError, match="cannot happen"):
            handle(state, EVENTS[event_type])
    else:
        after, _ = handle(state, EVENTS[event_type])
        assert after.phase is goes_to


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event_type", [on.BlocksWanted, on.FirstTokenArrived, on.Committed, on.TransferEnded])
def test_f09_an_event_of_another_try_changes_nothing_and_is_counted(phase: Phase, event_type: type) -> None:
    state, _ = run(new_inbound(FACTS), *PATHS[phase])
    event = EVENTS[event_type]
    if (phase, event_type) not in TRANSITIONS:
        return
    after, effects = handle(state, replace(event, try_number=9))  # type: ignore[arg-type]
    assert after == state
    assert len(effects) == 1
    assert isinstance(effects[0], on.CountDropped)


def test_an_unharmed_transfer_emits_the_first_token_before_its_kv_has_arrived() -> None:
    state, effects = run(new_inbound(FACTS), SUBMITTED, WANTED, TOKEN, RESERVED, COMMITTED, sampled(HISTORY + 1))
    assert effects == [
        on.SubmitToEngine(await_kv=True),
        on.BeginTry(1),
        on.ReserveBlocks(HISTORY),
        on.EmitToken(HISTORY, 77, -0.5),
        on.GiveBlocks(1, BLOCKS, 16, HISTORY),
        on.StartEngine(HISTORY, 77),
        on.EmitToken(HISTORY + 1, 100 + HISTORY + 1),
    ]
    assert state.phase is Phase.RUNNING


def test_f27_without_a_prefill_node_the_prompt_is_computed_here_and_counted() -> None:
    state, effects = run(new_inbound(replace(FACTS, prefill_choices=0, local_reason="short_prompt")), SUBMITTED)
    assert state.phase is Phase.RUNNING
    assert effects == [on.CountLocalPrefill("short_prompt", 0), on.SubmitToEngine(await_kv=False)]


def test_f01_the_proven_whole_blocks_are_kept_and_the_next_prefill_node_is_asked_for_the_rest() -> None:
    state, effects = run(new_inbound(FACTS), *PATHS[Phase.RECEIVING], LOST)
    assert effects[-1] == on.BeginTry(2)
    state, effects = run(state, on.BlocksWanted(2, HISTORY))
    assert effects == [on.GiveBlocks(2, BLOCKS, 32, HISTORY)]
    state, effects = run(state, on.TransferEnded(2, "peer_lost", 32))
    assert effects == [on.CountLocalPrefill("peer_lost", HISTORY - 32), on.StartEngine(32, None)]


def test_f01_the_first_token_survives_its_prefill_node_and_is_not_drawn_again() -> None:
    state, effects = run(new_inbound(FACTS), SUBMITTED, WANTED, RESERVED, TOKEN, LOST)
    state, effects = run(state, on.FirstTokenArrived(2, SettledToken(78)))
    assert effects == [on.CountDropped("duplicate")]
    state, effects = run(state, on.TransferEnded(2, "refused", 0))
    assert effects[-1] == on.StartEngine(32, 77)
    _, effects = run(state, sampled(HISTORY + 1))
    assert effects == [on.EmitToken(HISTORY + 1, 100 + HISTORY + 1)]


def test_f37_a_first_token_after_local_recompute_began_is_dropped_and_counted() -> None:
    state, _ = run(new_inbound(replace(FACTS, prefill_choices=1)), SUBMITTED, LOST)
    after, effects = run(state, TOKEN)
    assert (after, effects) == (state, [on.CountDropped("unknown_transfer")])


def test_a_second_try_that_is_worse_loses_nothing_of_the_first() -> None:
    state, _ = run(new_inbound(FACTS), *PATHS[Phase.RECEIVING], LOST, on.BlocksWanted(2, HISTORY))
    _, effects = run(state, on.TransferEnded(2, "peer_lost", 0))
    assert effects[-1] == on.StartEngine(32, None)


def test_blocks_reserved_for_a_try_that_is_over_serve_the_next() -> None:
    state, effects = run(new_inbound(FACTS), SUBMITTED, WANTED, on.TransferEnded(1, "peer_lost", 0))
    assert state.blocks == Awaited(HISTORY)
    assert on.ForgetInEngine() not in effects
    state, effects = run(state, RESERVED)
    assert isinstance(state.blocks, Held)
    assert effects == []
    _, effects = run(state, on.BlocksWanted(2, HISTORY))
    assert effects == [on.GiveBlocks(2, BLOCKS, 16, HISTORY)]


def test_blocks_still_awaited_are_given_to_the_next_try_when_they_come() -> None:
    state, _ = run(new_inbound(FACTS), SUBMITTED, WANTED, on.TransferEnded(1, "peer_lost", 0))
    state, effects = run(state, on.BlocksWanted(2, HISTORY))
    assert effects == []
    _, effects = run(state, RESERVED)
    assert effects == [on.GiveBlocks(2, BLOCKS, 16, HISTORY)]


def test_a_reservation_nobody_asked_for_is_a_bug() -> None:
    state, _ = run(new_inbound(FACTS), SUBMITTED)
    with pytest.raises(AssertionError):
        handle(state, RESERVED)


def test_a_declined_first_token_leaves_the_last_position_to_the_engine() -> None:
    _, effects = run(
        new_inbound(FACTS), SUBMITTED, WANTED, RESERVED, on.FirstTokenArrived(1, None), COMMITTED, sampled(HISTORY)
    )
    assert effects[-2:] == [on.StartEngine(HISTORY - 1, None), on.EmitToken(HISTORY, 100 + HISTORY)]


@pytest.mark.parametrize(
    ("facts", "token_id", "reason"),
    [
        (FACTS, EOS, FinishReason.STOP),
        (replace(FACTS, rules=replace(RULES, max_length=HISTORY + 1)), 77, FinishReason.LENGTH),
    ],
)
def test_f20_a_first_token_that_ends_the_request_ends_its_transfer_and_then_frees_its_blocks(
    facts: Facts, token_id: int, reason: FinishReason
) -> None:
    token = on.FirstTokenArrived(1, SettledToken(token_id))
    state, effects = run(new_inbound(facts), SUBMITTED, WANTED, RESERVED, token)
    assert effects[-2:] == [on.EmitToken(HISTORY, token_id, finish_reason=reason), on.EndTry(1, "done")]
    state, effects = run(state, on.TransferEnded(1, "done", 16))
    assert (state.phase, effects) == (Phase.ENDED, [on.ForgetInEngine()])


@pytest.mark.parametrize("phase", [Phase.ASKING, Phase.RESERVING, Phase.RECEIVING])
def test_f10_a_cancel_during_a_transfer_frees_blocks_only_after_the_transfer_has_ended(phase: Phase) -> None:
    state, _ = run(new_inbound(FACTS), *PATHS[phase])
    state, effects = run(state, CANCELLED)
    assert effects == [on.EmitEnd(FinishReason.CANCELLED, "client_gone"), on.EndTry(1, "client_gone")]
    state, effects = run(state, LOST)
    assert effects == [on.ForgetInEngine()]


def test_blocks_that_can_never_be_had_fail_the_attempt_by_name() -> None:
    state, _ = run(new_inbound(FACTS), SUBMITTED, WANTED)
    state, effects = run(state, on.BlocksUnavailable("larger_than_pool"))
    assert effects == [on.EmitEnd(FinishReason.FAILED, "larger_than_pool"), on.RefuseBlocks(1, "larger_than_pool")]


def test_a_token_out_of_order_is_a_bug() -> None:
    state, _ = run(new_inbound(FACTS), *PATHS[Phase.RUNNING])
    with pytest.raises(AssertionError, match="is next"):
        handle(state, sampled(HISTORY + 1))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_happens_tokens_are_in_order_and_the_engine_starts_or_forgets_once(data: st.DataObject) -> None:
    facts = replace(FACTS, prefill_choices=data.draw(st.integers(0, 3)))
    state, effects = run(new_inbound(facts), SUBMITTED)
    for _ in range(data.draw(st.integers(0, 14))):
        try_number = state.try_number
        events: list[on.Event] = [
            on.Cancelled("gone"),
            on.EngineFailed("engine_error"),
            on.BlocksWanted(try_number, HISTORY),
            on.FirstTokenArrived(try_number, data.draw(st.sampled_from([None, SettledToken(77), SettledToken(EOS)]))),
            on.Committed(try_number, HISTORY),
            on.TransferEnded(try_number, "peer_lost", data.draw(st.integers(0, HISTORY))),
        ]
        if isinstance(state.blocks, Awaited) and not any(isinstance(effect, on.ForgetInEngine) for effect in effects):
            events.append(RESERVED)
        if state.phase is Phase.RUNNING:
            events.append(sampled(state.next_position, data.draw(st.sampled_from([None, FinishReason.LENGTH]))))
        possible = [event for event in events if (state.phase, type(event)) in TRANSITIONS]
        state, new = handle(state, data.draw(st.sampled_from(possible)))
        effects += new
    tokens = [effect for effect in effects if isinstance(effect, on.EmitToken)]
    assert [token.position for token in tokens] == list(range(HISTORY, HISTORY + len(tokens)))
    ends = [index for index, effect in enumerate(effects) if is_end(effect)]
    assert len(ends) <= 1
    assert not ends or not any(isinstance(effect, on.EmitToken) for effect in effects[ends[0] + 1 :])
    assert sum(isinstance(effect, on.StartEngine) for effect in effects) <= 1
    assert sum(isinstance(effect, on.ForgetInEngine) for effect in effects) <= 1
    assert (state.phase in (Phase.ENDING, Phase.ENDED)) == bool(ends)


def is_end(effect: on.Effect) -> bool:
    return isinstance(effect, on.EmitEnd) or (isinstance(effect, on.EmitToken) and effect.finish_reason is not None)
