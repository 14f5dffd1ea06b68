"""A request's life in the router: its table, and that no order of messages loses or repeats a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.ids import NodeId, RequestId
from router.journey import (
    TRANSITIONS,
    AttemptLost,
    AttemptReason,
    Begin,
    CancelAttempt,
    ClientLeft,
    DeadlinePassed,
    Deliver,
    Dropped,
    Effect,
    Ending,
    Event,
    Fail,
    Finish,
    Journey,
    Moved,
    NoPlace,
    Output,
    PatienceOver,
    Place,
    Placed,
    State,
    StopStringFound,
)

PROMPT = 10
D0, D1 = NodeId("d0"), NodeId("d1")


@dataclass(frozen=True)
class Token:
    position: int
    token_id: int


def tokens(first: int, *ids: int) -> tuple[Token, ...]:
    """Tokens of an answer, from its `first`-th on."""
    return tuple(Token(PROMPT + first + index, token_id) for index, token_id in enumerate(ids))


def running(node: NodeId = D0, max_tokens: int = 100, most_lost: int = 5) -> Journey:
    journey = Journey(RequestId("r"), PROMPT, max_tokens, most_lost)
    assert journey.begin() == [Place(frozenset())]
    assert journey.handle(Placed(node)) == [Begin(1, node, AttemptReason.FIRST)]
    return journey


def in_state(state: State) -> Journey:
    journey = Journey(RequestId("r"), PROMPT, 100)
    if state is not State.PLACING:
        journey.handle(Placed(D0))
    match state:
        case State.FINISHED:
            journey.handle(Output(1, tokens(0, 5), Ending.STOP))
        case State.FAILED:
            journey.handle(DeadlinePassed())
        case State.CANCELLED:
            journey.handle(ClientLeft())
        case _:
            pass
    assert journey.state is state
    return journey


EVENTS: dict[type[Event], Event] = {
    Placed: Placed(D1),
    NoPlace: NoPlace("no_decode_node"),
    Moved: Moved(1, D1),
    PatienceOver: PatienceOver(),
    Output: Output(1, tokens(0, 7)),
    AttemptLost: AttemptLost(1, "node_silent"),
    StopStringFound: StopStringFound(),
    ClientLeft: ClientLeft(),
    DeadlinePassed: DeadlinePassed(),
}
TERMINAL = (State.FINISHED, State.FAILED, State.CANCELLED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_every_pair_of_state_and_event_is_handled_or_a_bug(state: State, kind: type[Event]) -> None:
    journey = in_state(state)
    if (state, kind) not in TRANSITIONS:
        assert (kind in (Placed, NoPlace) and state is not State.PLACING) or (
            kind is Moved and state is not State.RUNNING
        ), "only answers to Place, and moves of what has no node, may be absent"
        with pytest.raises(KeyError):
            journey.handle(EVENTS[kind])
        return
    effects = journey.handle(EVENTS[kind])
    if state in TERMINAL:
        assert journey.state is state
        assert all(isinstance(effect, Dropped) for effect in effects)
    ends = [effect for effect in effects if isinstance(effect, Finish | Fail)]
    assert len(ends) == (1 if state not in TERMINAL and journey.state in (State.FINISHED, State.FAILED) else 0)


def test_tokens_in_order_are_delivered_and_logged() -> None:
    journey = running()
    assert journey.handle(Output(1, tokens(0, 4, 5))) == [Deliver(tokens(0, 4, 5))]
    assert journey.handle(Output(1, tokens(2, 6), Ending.LENGTH)) == [Deliver(tokens(2, 6)), Finish(Ending.LENGTH)]
    assert journey.log == [4, 5, 6]


def test_a_lost_node_leads_to_a_new_attempt_elsewhere_with_the_log_kept() -> None:
    journey = running()
    journey.handle(Output(1, tokens(0, 4, 5)))
    effects = journey.handle(AttemptLost(1, "node_silent"))
    assert effects == [CancelAttempt(1, D0, "node_silent"), Place(frozenset({D0}))]
    assert journey.handle(Placed(D1)) == [Begin(2, D1, AttemptReason.NODE_LOST)]
    assert journey.handle(Output(2, tokens(2, 6))) == [Deliver(tokens(2, 6))]
    assert journey.log == [4, 5, 6]


def test_f36_a_former_node_that_lives_on_adds_nothing() -> None:
    journey = running()
    journey.handle(AttemptLost(1, "stream_unavailable"))
    journey.handle(Placed(D1))
    assert journey.handle(Output(1, tokens(0, 9, 9), Ending.STOP)) == [Dropped("stale_attempt", 2)]
    assert journey.log == []
    assert journey.state is State.RUNNING


def test_f37_a_token_for_a_settled_position_is_dropped_and_counted() -> None:
    journey = running()
    journey.handle(Output(1, tokens(0, 4, 5)))
    assert journey.handle(Output(1, tokens(1, 9, 6))) == [Deliver(tokens(2, 6)), Dropped("stale_position", 1)]
    assert journey.log == [4, 5, 6]


def test_a_gap_in_positions_ends_the_attempt_and_what_comes_after_it_is_never_shown() -> None:
    journey = running()
    effects = journey.handle(Output(1, tokens(1, 9), Ending.STOP))
    assert effects == [Dropped("position_gap", 1), CancelAttempt(1, D0, "position_gap"), Place(frozenset({D0}))]
    assert journey.log == []


def test_a_request_takes_down_a_bounded_number_of_nodes() -> None:
    journey = running(most_lost=2)
    journey.handle(AttemptLost(1, "node_silent"))
    journey.handle(Placed(D1))
    assert journey.handle(AttemptLost(2, "node_silent"))[-1] == Fail("node_silent", retryable=True)


def test_a_node_that_refuses_twice_for_the_same_reason_is_not_asked_again() -> None:
    journey = running()

    def refusal(attempt: int) -> Output:
        return Output(attempt, ending=Ending.FAILED, failure="overloaded", retryable=True)

    assert journey.handle(refusal(1)) == [Place(frozenset({D0}))]
    assert journey.handle(Placed(D0)) == [Begin(2, D0, AttemptReason.NODE_REFUSED)]
    assert journey.handle(refusal(2)) == [Fail("overloaded", retryable=True)]


def test_a_stream_that_has_begun_asks_a_full_node_again_when_the_node_says() -> None:
    journey = running(most_lost=2)
    journey.handle(Output(1, tokens(0, 4)))

    def refusal(attempt: int) -> Output:
        return Output(attempt, ending=Ending.FAILED, failure="overloaded", retryable=True, retry_after_s=0.5)

    assert journey.handle(refusal(1)) == [Place(frozenset({D0}))]
    for attempt in range(2, 6):
        assert journey.handle(Placed(D0)) == [Begin(attempt, D0, AttemptReason.NODE_REFUSED)]
        assert journey.handle(refusal(attempt)) == [Place(frozenset({D0}), 0.5)]
    assert journey.lost == [(D0, "overloaded")]
    assert journey.handle(DeadlinePassed()) == [Fail("deadline", retryable=True)]


def test_f23_a_stream_moves_from_a_node_that_leaves_with_its_log_and_what_comes_late_changes_nothing() -> None:
    journey = running(most_lost=1)
    journey.handle(Output(1, tokens(0, 4, 5)))
    effects = journey.handle(Moved(1, D1))
    assert effects == [CancelAttempt(1, D0, "moved"), Begin(2, D1, AttemptReason.NODE_DRAINING)]
    assert journey.handle(Moved(1, D0)) == []
    assert journey.handle(Output(1, tokens(2, 9), Ending.CANCELLED)) == [Dropped("stale_attempt", 1)]
    assert journey.handle(Output(2, tokens(2, 6))) == [Deliver(tokens(2, 6))]
    assert journey.log == [4, 5, 6]
    assert journey.lost == []


def test_a_final_failure_is_passed_on() -> None:
    assert running().handle(Output(1, ending=Ending.FAILED, failure="prompt_too_long")) == [
        Fail("prompt_too_long", retryable=False)
    ]


def test_a_node_that_cancels_by_itself_is_a_lost_attempt() -> None:
    assert running().handle(Output(1, ending=Ending.CANCELLED)) == [Place(frozenset({D0}))]


def test_a_loss_after_the_last_token_is_an_end_and_not_a_new_attempt() -> None:
    journey = running(max_tokens=2)
    journey.handle(Output(1, tokens(0, 4, 5)))
    assert journey.handle(AttemptLost(1, "node_silent"))[-1] == Finish(Ending.LENGTH)


def test_f10_a_client_that_leaves_cancels_its_attempt() -> None:
    assert running().handle(ClientLeft()) == [CancelAttempt(1, D0, "client_left")]


def test_a_stop_string_ends_the_request_at_its_node_too() -> None:
    assert running().handle(StopStringFound()) == [CancelAttempt(1, D0, "stop_string"), Finish(Ending.STOP)]


def test_without_a_node_the_reason_is_kept_until_patience_is_over() -> None:
    journey = Journey(RequestId("r"), PROMPT, 10)
    journey.begin()
    assert journey.handle(NoPlace("node_draining")) == []
    assert journey.waiting_reason == "node_draining"
    assert journey.handle(PatienceOver()) == [Fail("node_draining", retryable=True)]


ANSWER = tuple(range(100, 120))


@settings(deadline=None)
@given(st.data())
def test_no_order_of_losses_repeats_and_late_messages_loses_or_repeats_a_token(data: st.DataObject) -> None:
    """Nodes compute ANSWER from their settled tokens on; their messages arrive in any interleaving, some twice, some never."""
    journey = Journey(RequestId("r"), PROMPT, len(ANSWER), most_lost=50)
    delivered: list[int] = []
    settled_at: dict[int, int] = {}

    def carry_out(effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(new):
                    delivered.extend(token.token_id for token in new)
                case Place():
                    carry_out(journey.handle(Placed(NodeId(f"d{journey.attempt}"))))
                case Begin(attempt, _, _):
                    settled_at[attempt] = len(journey.log)
                case _:
                    pass

    carry_out(journey.begin())
    for _ in range(data.draw(st.integers(0, 60))):
        attempt = data.draw(st.sampled_from(sorted(settled_at)))
        if data.draw(st.integers(0, 9)) == 0:
            carry_out(journey.handle(AttemptLost(attempt, "node_silent")))
            continue
        if journey.state is State.RUNNING and data.draw(st.integers(0, 9)) == 0:
            carry_out(journey.handle(Moved(attempt, NodeId(f"d{attempt}"))))
            continue
        # Anything that this attempt may ever have said: a run of its own answer.
        first = data.draw(st.integers(settled_at[attempt], len(ANSWER) - 1))
        end = data.draw(st.integers(first + 1, len(ANSWER)))
        ending = Ending.LENGTH if end == len(ANSWER) else None
        carry_out(journey.handle(Output(attempt, tokens(first, *ANSWER[first:end]), ending)))
        assert tuple(journey.log) == ANSWER[: len(journey.log)]
        assert delivered == journey.log
        if journey.state is State.FINISHED:
            assert tuple(delivered) == ANSWER
