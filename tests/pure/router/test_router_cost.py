"""The cost model: what it predicts, what wins, and what it does before anything has been measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import Role
from router.cost import FIXED_TRANSFER_S, STREAM_WAIT_WEIGHT, Choice, Transfer, Work, predict
from router.placement import Candidate, Disaggregate, NodeKey, Placement, PrefixMemory, place, prefix_chain

TOKEN_BYTES = 128 * 1024
PROMPT = tuple(range(2048))
CHAIN = prefix_chain(PROMPT)
SPEED = 40_000.0


def transfer(tokens: int, gigabytes_per_second: float) -> Transfer:
    return Transfer(tokens * TOKEN_BYTES, gigabytes_per_second * 1e9)


def test_the_formula_by_hand() -> None:
    found = predict(Work(1000, 2000, 10_000.0), Work(500, 1000, 20_000.0), transfer(2000, 2.0))
    assert found.alone_s == pytest.approx(0.3)
    wire_s = 2000 * TOKEN_BYTES / 2e9
    assert found.together_s == pytest.approx(0.025 + 0.05 + FIXED_TRANSFER_S + wire_s - 0.05)
    assert found.choice is Choice.PREFILL_IS_FASTER


def test_a_lane_faster_than_the_computing_is_hidden_behind_it() -> None:
    found = predict(Work(0, 2048, SPEED), Work(0, 2048, SPEED), transfer(2048, 50.0))
    assert found.together_s == pytest.approx(2048 / SPEED + FIXED_TRANSFER_S)
    assert found.choice is Choice.DECODE_IS_FASTER, "an idle D loses nothing by computing itself"


def test_a_slow_link_stays_local_and_a_busy_decode_node_goes_remote() -> None:
    busy = Work(8192, 2048, SPEED)
    assert predict(busy, Work(0, 2048, SPEED), transfer(2048, 0.00125)).choice is Choice.DECODE_IS_FASTER
    assert predict(busy, Work(0, 2048, SPEED), transfer(2048, 5.0)).choice is Choice.PREFILL_IS_FASTER


def test_streams_on_d_share_its_steps_and_what_they_would_wait_counts() -> None:
    busy = Work(0, 2048, SPEED, streams=16, step_tokens=512)
    found = predict(busy, Work(0, 2048, SPEED), transfer(2048, 50.0))
    assert found.alone_s == pytest.approx((2048 + 4 * 16) / SPEED)
    assert found.delay_s == pytest.approx(STREAM_WAIT_WEIGHT * 16 * 2048 / SPEED)
    assert found.choice is Choice.PREFILL_IS_FASTER
    one_stream, a_little_slower = replace(busy, streams=1), transfer(2048, 5.2)
    found = predict(one_stream, Work(0, 2048, SPEED), a_little_slower)
    assert found.alone_s is not None
    assert found.together_s is not None
    assert found.alone_s < found.together_s, "alone would be the earlier first token"
    assert found.remote, "but the stream on D would wait for it"
    far = transfer(2048, 0.00125)
    assert not predict(busy, Work(0, 2048, SPEED), far).remote, "at 10 Mbit/s nothing makes up for the wire"


def test_prompts_queued_on_p_count_as_tokens_and_nothing_else() -> None:
    candidates = [node("d", Role.DECODE), node("p", Role.PREFILL, sequences=50)]
    found = place(len(PROMPT), 10, CHAIN, candidates, PrefixMemory())
    assert isinstance(found, Placement)
    assert found.prediction is not None
    idle = place(len(PROMPT), 10, CHAIN, [candidates[0], node("p", Role.PREFILL)], PrefixMemory())
    assert isinstance(idle, Placement)
    assert idle.prediction == found.prediction


def test_what_has_not_been_measured_is_tried() -> None:
    unmeasured = Work(0, 2048, 0.0)
    assert predict(unmeasured, unmeasured, transfer(2048, 1.0)).choice is Choice.UNMEASURED
    assert predict(unmeasured, unmeasured, transfer(2048, 1.0)).remote
    as_fast_as_the_other = predict(unmeasured, Work(0, 2048, SPEED), transfer(2048, 1.0))
    assert as_fast_as_the_other == predict(Work(0, 2048, SPEED), Work(0, 2048, SPEED), transfer(2048, 1.0))
    unknown_lane = predict(Work(8192, 2048, SPEED), Work(0, 2048, SPEED), transfer(2048, 0.0))
    assert unknown_lane.choice is Choice.PREFILL_IS_FASTER


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.floats(1, 1e6),
    st.floats(0.001, 100),
    st.integers(1, 10**6),
)
def test_more_work_on_a_side_never_makes_it_win(
    decode_ahead: int, prefill_ahead: int, missing: int, speed: float, gigabytes: float, more: int
) -> None:
    decode, prefill = Work(decode_ahead, missing, speed), Work(prefill_ahead, missing, speed)
    wire = transfer(missing, gigabytes)
    before = predict(decode, prefill, wire)
    assert before.alone_s is not None
    assert before.together_s is not None
    if before.choice is Choice.PREFILL_IS_FASTER:
        assert predict(replace(decode, queued_tokens=decode_ahead + more), prefill, wire).remote
    else:
        slower = replace(prefill, queued_tokens=prefill_ahead + more)
        assert predict(decode, slower, wire).choice is Choice.DECODE_IS_FASTER


def node(name: str, role: Role, **changes: object) -> Candidate:
    key = NodeKey(NodeId(name), Incarnation(1))
    lanes = {NodeId("p"): 5e9} if role is Role.DECODE else {}
    found = Candidate(key, role, None, "same", 8192, 0, 0, SPEED, TOKEN_BYTES, lanes=lanes)
    return replace(found, **changes)  # type: ignore[arg-type]


def placed(decode: Candidate, prefill: Candidate | None, how: Disaggregate, memory: PrefixMemory) -> Placement:
    candidates = [one for one in (decode, prefill) if one is not None]
    found = place(len(PROMPT), 10, CHAIN, candidates, memory, disaggregate=how)
    assert isinstance(found, Placement)
    return found


def test_auto_takes_the_cheaper_way_and_says_why() -> None:
    idle, prefill = node("d", Role.DECODE), node("p", Role.PREFILL)
    found = placed(idle, prefill, Disaggregate.AUTO, PrefixMemory())
    assert (found.prefill, found.local_reason) == ((), "decode_is_faster")
    assert found.prediction is not None
    assert found.expected_s == found.prediction.alone_s
    found = placed(replace(idle, queued_tokens=10_000), prefill, Disaggregate.AUTO, PrefixMemory())
    assert (found.prefill, found.local_reason) == ((prefill.key,), "")
    assert found.prediction is not None
    assert found.expected_s == found.prediction.together_s


def test_always_and_never_ask_nobody() -> None:
    idle, busy, prefill = node("d", Role.DECODE), node("d", Role.DECODE, queued_tokens=10_000), node("p", Role.PREFILL)
    assert placed(idle, prefill, Disaggregate.ALWAYS, PrefixMemory()).prefill == (prefill.key,)
    found = placed(busy, prefill, Disaggregate.NEVER, PrefixMemory())
    assert (found.prefill, found.local_reason) == ((), "disaggregation_off")
    assert found.expected_s == pytest.approx((10_000 + len(PROMPT)) / SPEED)


def test_what_a_node_holds_is_neither_computed_nor_sent() -> None:
    decode, prefill, memory = node("d", Role.DECODE, queued_tokens=1000), node("p", Role.PREFILL), PrefixMemory()
    memory.remember(CHAIN, decode.key)
    found = placed(decode, prefill, Disaggregate.AUTO, memory)
    assert found.local_reason == "decode_is_faster", "D has the prompt"
    memory = PrefixMemory()
    memory.remember(CHAIN, prefill.key)
    slow = replace(decode, queued_tokens=0, tokens_per_second=SPEED / 10)
    assert placed(slow, prefill, Disaggregate.AUTO, memory).prefill == (prefill.key,)
