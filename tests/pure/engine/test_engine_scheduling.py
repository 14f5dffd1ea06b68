"""What the scheduler chooses, fact by fact, on small engines with the fake runner."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import Wish, World, submit_of
from fake_runner import FakeRunner, next_token

from engine.config import EngineConfig
from engine.loop import Engine
from engine.port import (
    Cancel,
    EngineEvent,
    FinishReason,
    KvComputed,
    KvReserved,
    KvUnavailable,
    Mode,
    PrefillReserved,
    ReleaseKv,
    RequestFailed,
    RequestKey,
    ReserveKv,
    StartFromKv,
    TokenSampled,
)
from engine.scheduler.prefill import even_shares
from engine.scheduler.scheduler import Scheduler
from engine.step import StepResult


def engine_of(**changes: object) -> tuple[Engine, FakeRunner]:
    values = {
        "block_size": 4,
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    config = EngineConfig(**{**values, **changes})  # type: ignore[arg-type]
    runner = FakeRunner(config)
    return Engine(config, runner, runner.owner_words), runner


def drive(engine: Engine) -> list[EngineEvent]:
    events = []
    for _ in range(500):
        events += engine.step()
        engine.scheduler.check()
        if not engine.status().has_work:
            return events
    raise AssertionError("the engine does not come to rest")


def key(name: str) -> RequestKey:
    return RequestKey(name)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt + i * i) % 23 for i in range(length))


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_and_a_prompts_chunk_share_one_step_under_the_token_budget(overlap: bool) -> None:
    engine, runner = engine_of(max_num_batched_tokens=8, overlap=overlap)
    engine.take(submit_of("short", prompt(4), max_tokens=30))
    engine.step()
    engine.step()
    engine.take(submit_of("long", prompt(20, 1), max_tokens=2))
    engine.step()
    mixed = runner.launched[-1]
    assert (mixed.rows, mixed.tokens) == (2, 8)
    assert mixed.query_start.tolist() == [0, 1, 8]


@pytest.mark.parametrize(("shared_tokens", "first_steps"), [(60, [[3, 21], [1, 23]]), (0, [[24], [24]])])
def test_prompts_that_are_short_enough_together_share_steps_and_others_take_turns(
    shared_tokens: int, first_steps: list[list[int]]
) -> None:
    """A long prompt came first. Sharing, the short one ends with its first step; in turns it waits for all of the long one."""
    engine, runner = engine_of(max_num_batched_tokens=24, shared_prompt_tokens=shared_tokens, num_blocks=64)
    engine.take(submit_of("long", prompt(50), max_tokens=2))
    engine.take(submit_of("short", prompt(3, 1), max_tokens=2))
    drive(engine)
    chunks = [sorted(np.diff(plan.query_start).tolist()) for plan in runner.launched[:2]]
    assert chunks == first_steps


def test_shares_are_even_use_up_the_budget_and_exceed_no_length() -> None:
    assert even_shares(np.array([50, 3, 50]), 23).tolist() == [10, 3, 10]
    assert even_shares(np.array([5, 5]), 100).tolist() == [5, 5]
    assert even_shares(np.array([9, 9, 9]), 20).tolist() == [6, 7, 7]
    assert even_shares(np.array([], np.int64), 20).tolist() == []


def test_a_row_that_ends_by_length_is_not_scheduled_once_more_and_one_that_stops_costs_one_late_row() -> None:
    for max_tokens, stop, rows in ((3, (), 3), (9, (next_token(prompt(4)),), 2)):
        engine, runner = engine_of(overlap=True)
        engine.take(submit_of("r", prompt(4), max_tokens=max_tokens, stop_token_ids=stop))
        sampled = [event for event in drive(engine) if isinstance(event, TokenSampled)]
        assert len(runner.launched) == rows
        assert sampled[-1].finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)


def test_the_next_steps_input_is_fed_back_before_the_host_knows_it() -> None:
    engine, runner = engine_of(overlap=True)
    engine.take(submit_of("r", prompt(4), max_tokens=3, ignore_eos=True))
    drive(engine)
    assert [plan.feedback.tolist() for plan in runner.launched] == [[-1] * 4, [0], [0]]


def test_a_cached_prefix_is_not_computed_again_but_its_last_position_is() -> None:
    engine, runner = engine_of()
    engine.take(submit_of("a", prompt(12), max_tokens=1))
    drive(engine)
    engine.take(submit_of("b", prompt(12), max_tokens=1))
    (event,) = drive(engine)
    assert isinstance(event, TokenSampled)
    assert (event.prompt_cached, event.prompt_transferred, event.prompt_computed) == (8, 0, 4)
    assert runner.launched[-1].positions.tolist() == [8, 9, 10, 11]


def test_without_prefix_caching_everything_is_computed_and_freed() -> None:
    engine, runner = engine_of(enable_prefix_caching=False)
    for name in "ab":
        engine.take(submit_of(name, prompt(12), max_tokens=1))
        drive(engine)
    assert [plan.tokens for plan in runner.launched] == [12, 12]
    assert engine.status().blocks_free == 16


def test_f19_block_edges_compute_exactly_what_is_missing() -> None:
    for length in (1, 3, 4, 5, 16):
        engine, runner = engine_of()
        for name in "ab":
            engine.take(submit_of(name, prompt(length), max_tokens=2, ignore_eos=True))
            drive(engine)
        assert [plan.tokens for plan in runner.launched] == [length, 1, length - (length - 1) // 4 * 4, 1]


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (submit_of("r", ()), "prompt_empty"),
        (submit_of("r", prompt(64)), "prompt_too_long"),
        (submit_of("r", prompt(60), settled=(1, 2, 3, 4)), "prompt_too_long"),
        (submit_of("r", prompt(40)), "prompt_exceeds_kv_cache"),
        (submit_of("r", prompt(4), max_tokens=2, settled=(1, 2)), "nothing_to_generate"),
    ],
)
def test_f12_what_can_never_be_served_is_refused_at_once_by_name(wish: object, reason: str) -> None:
    engine, _ = engine_of(num_blocks=8)
    engine.take(wish)  # type: ignore[arg-type]
    assert engine.step() == [RequestFailed(key("r"), reason)]


def test_the_waiting_line_is_bounded() -> None:
    engine, _ = engine_of(max_waiting_requests=2)
    for name in "abc":
        engine.take(submit_of(name, prompt(4)))
    assert engine.scheduler.drain() == [RequestFailed(key("c"), "queue_full")]


def test_a_sequence_that_fills_the_context_ends_by_length() -> None:
    engine, _ = engine_of(max_model_len=10)
    engine.take(submit_of("r", prompt(8), max_tokens=50, ignore_eos=True))
    sampled = [event for event in drive(engine) if isinstance(event, TokenSampled)]
    assert [(event.position, event.finish_reason) for event in sampled] == [(8, None), (9, FinishReason.LENGTH)]


def test_f20_min_tokens_bans_the_stop_tokens_until_it_is_reached() -> None:
    stop = next_token(prompt(4))
    engine, runner = engine_of(eos_token_ids=(stop,))
    engine.take(submit_of("r", prompt(4), max_tokens=9, min_tokens=1))
    assert next(event for event in drive(engine) if isinstance(event, TokenSampled)).token_id != stop
    assert [plan.sampling.banned for plan in runner.launched[:2]] == [((0, stop),), ()]


def test_settled_tokens_are_history_and_count_as_output() -> None:
    first = next_token(prompt(6))
    engine, _ = engine_of()
    engine.take(submit_of("r", prompt(6), settled=(first,), max_tokens=2, ignore_eos=True))
    (event,) = drive(engine)
    assert isinstance(event, TokenSampled)
    assert (event.position, event.token_id) == (7, next_token((*prompt(6), first)))
    assert event.finish_reason is FinishReason.LENGTH


def test_a_prefill_nodes_request_reserves_everything_reports_chunks_and_holds_its_blocks() -> None:
    engine, _ = engine_of(max_num_batched_tokens=6)
    engine.take(submit_of("p", prompt(10), mode=Mode.PREFILL_ONLY))
    events = drive(engine)
    reserved = events[0]
    assert isinstance(reserved, PrefillReserved)
    assert len(reserved.block_ids) == 3
    assert reserved.cached_positions == 0
    assert [e.computed_positions for e in events if isinstance(e, KvComputed)] == [6, 10]
    assert isinstance(events[-1], TokenSampled)
    assert (engine.status().blocks_in_use, engine.status().running) == (3, 0)
    engine.take(ReleaseKv(key("p")))
    engine.step()
    assert (engine.status().blocks_in_use, engine.status().blocks_cached) == (0, 2)


@pytest.mark.parametrize(("length", "computed_anew"), [(8, 0), (9, 1), (11, 3)])
def test_a_prefill_node_computes_nothing_of_a_prompt_whose_kv_is_all_cached(length: int, computed_anew: int) -> None:
    engine, _ = engine_of()
    engine.take(submit_of("before", prompt(length), mode=Mode.PREFILL_ONLY))
    drive(engine)
    engine.take(ReleaseKv(key("before")))
    engine.step()
    steps = engine.status().steps
    engine.take(submit_of("p", prompt(length), mode=Mode.PREFILL_ONLY))
    events = drive(engine)
    assert isinstance(events[0], PrefillReserved)
    assert events[0].cached_positions == length - computed_anew
    assert any(isinstance(event, TokenSampled) for event in events) == bool(computed_anew)
    assert (engine.status().steps > steps) == bool(computed_anew)
    assert engine.status().blocks_in_use == len(events[0].block_ids)
    engine.take(ReleaseKv(key("p")))
    engine.step()
    assert engine.status().blocks_in_use == 0


def test_a_prefill_nodes_request_is_never_preempted() -> None:
    engine, _ = engine_of(num_blocks=4, enable_prefix_caching=False)
    engine.take(submit_of("d", prompt(4), max_tokens=20, ignore_eos=True))
    engine.step()
    engine.take(submit_of("p", prompt(4, 1), mode=Mode.PREFILL_ONLY))
    events = drive(engine)  # comes to rest with d waiting for p's block
    assert engine.status().preemptions == 0
    assert engine.status().running == 1
    engine.take(ReleaseKv(key("p")))
    events += drive(engine)
    assert [e.finish_reason for e in events if isinstance(e, TokenSampled) and e.key == "d"][-1] is FinishReason.LENGTH


def test_the_latest_request_gives_way_and_loses_no_token() -> None:
    world = World(EngineConfig(4, 6, 2, 16, 64, overlap=True, enable_prefix_caching=False))
    for name in ("old", "new"):
        world.add(Wish(submit_of(name, prompt(7, len(name)), max_tokens=12, ignore_eos=True)))
    world.run()
    world.compare()
    assert world.engine.status().preemptions > 0


def test_a_reservation_waits_its_turn_and_nobody_younger_overtakes_it() -> None:
    engine, _ = engine_of(num_blocks=4, enable_prefix_caching=False)
    engine.take(submit_of("first", prompt(8), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("first"), 8))
    engine.take(submit_of("second", prompt(12, 1), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("second"), 12))
    engine.take(submit_of("third", prompt(4, 2)))
    assert [event.key for event in drive(engine)] == ["first"]
    engine.take(Cancel(key("first")))
    events = engine.step()
    assert isinstance(events[0], KvReserved)
    assert events[0].key == "second"


def test_a_start_without_kv_ends_the_wait_for_a_reservation() -> None:
    engine, _ = engine_of(num_blocks=4)
    engine.take(submit_of("holder", prompt(12), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("holder"), 12))
    engine.take(submit_of("r", prompt(8, 1), mode=Mode.AWAIT_KV, max_tokens=1))
    engine.take(ReserveKv(key("r"), 8))
    drive(engine)
    engine.take(Cancel(key("holder")))
    engine.take(StartFromKv(key("r"), 0))
    (event,) = drive(engine)
    assert isinstance(event, TokenSampled)
    assert event.prompt_computed == 8


def test_a_reservation_beyond_the_pool_is_unavailable() -> None:
    engine, _ = engine_of(num_blocks=4)
    engine.take(submit_of("r", prompt(8), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("r"), 17))
    assert engine.step() == [KvUnavailable(key("r"), "prompt_exceeds_kv_cache")]


def test_f19_a_prompt_that_is_wholly_cached_needs_no_transfer() -> None:
    engine, _ = engine_of()
    engine.take(submit_of("a", prompt(8), max_tokens=1))
    drive(engine)
    engine.take(submit_of("b", prompt(8), mode=Mode.AWAIT_KV, max_tokens=2, ignore_eos=True))
    engine.take(ReserveKv(key("b"), 8))
    (reserved,) = drive(engine)
    assert isinstance(reserved, KvReserved)
    assert reserved.from_position == reserved.end_position == 8
    first = next_token(prompt(8))
    engine.take(StartFromKv(key("b"), 8, first))
    (event,) = drive(engine)
    assert isinstance(event, TokenSampled)
    assert (event.position, event.token_id) == (9, next_token((*prompt(8), first)))
    assert (event.prompt_cached, event.prompt_transferred, event.prompt_computed) == (8, 0, 0)


def test_a_shared_block_is_not_written_when_only_the_last_logits_are_missing() -> None:
    engine, runner = engine_of()
    engine.take(submit_of("a", prompt(8), max_tokens=1))
    drive(engine)
    engine.take(submit_of("b", prompt(8), mode=Mode.AWAIT_KV, max_tokens=1))
    engine.take(ReserveKv(key("b"), 8))
    (reserved,) = drive(engine)
    assert isinstance(reserved, KvReserved)
    engine.take(StartFromKv(key("b"), 8))
    (event,) = drive(engine)
    assert isinstance(event, TokenSampled)
    assert event.token_id == next_token(prompt(8))
    assert not {slot // 4 for slot in runner.launched[-1].slot_mapping.tolist()} & set(reserved.block_ids)


def test_received_kv_joins_the_prefix_cache() -> None:
    world = World(EngineConfig(4, 16, 4, 16, 64))
    world.add(Wish(submit_of("d", prompt(13), mode=Mode.AWAIT_KV, max_tokens=3, ignore_eos=True)))
    world.run()
    world.engine.take(submit_of("again", prompt(13), max_tokens=1))
    (event,) = drive(world.engine)
    assert isinstance(event, TokenSampled)
    assert event.prompt_cached == 12


def test_f01_the_next_try_keeps_what_the_first_one_proved() -> None:
    engine, _ = engine_of()
    engine.take(submit_of("d", prompt(14), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("d"), 14))
    (first,) = drive(engine)
    engine.take(ReserveKv(key("d"), 14, computed_positions=9))
    (second,) = drive(engine)
    assert isinstance(first, KvReserved)
    assert isinstance(second, KvReserved)
    assert second.block_ids == first.block_ids
    assert (first.from_position, second.from_position) == (0, 8)


def test_f38_a_cached_prefix_that_was_evicted_before_the_reservation_is_asked_for() -> None:
    engine, _ = engine_of(num_blocks=4)
    engine.take(submit_of("a", prompt(8), max_tokens=1))
    drive(engine)
    engine.take(submit_of("d", prompt(8), mode=Mode.AWAIT_KV))
    engine.take(submit_of("evicts", prompt(14, 5), max_tokens=1))
    drive(engine)
    engine.take(ReserveKv(key("d"), 8))
    (reserved,) = drive(engine)
    assert isinstance(reserved, KvReserved)
    assert reserved.from_position == 0


def test_f20_a_first_token_that_ends_the_request_is_reported_with_its_reason() -> None:
    engine, _ = engine_of(eos_token_ids=(7,))
    engine.take(submit_of("d", prompt(8), mode=Mode.AWAIT_KV))
    engine.take(ReserveKv(key("d"), 8))
    drive(engine)
    engine.take(StartFromKv(key("d"), 8, 7))
    assert drive(engine) == [TokenSampled(key("d"), 8, 7, FinishReason.STOP)]
    assert engine.status().blocks_in_use == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_f10_a_cancel_frees_everything_at_any_stage(mode: Mode, steps: int, overlap: bool) -> None:
    engine, runner = engine_of(max_num_batched_tokens=4, overlap=overlap)
    engine.take(submit_of("r", prompt(9), mode=mode, ignore_eos=True, max_tokens=40))
    if mode is Mode.AWAIT_KV and steps:
        engine.take(ReserveKv(key("r"), 9))
    for _ in range(steps):
        engine.step()
    launched = len(runner.launched)
    engine.take(Cancel(key("r")))
    engine.take(Cancel(key("r")))
    assert not [event for event in drive(engine) if isinstance(event, TokenSampled)]
    assert len(runner.launched) == launched
    assert engine.status().blocks_in_use == 0


def test_f28_a_cancel_changes_nothing_for_its_neighbours() -> None:
    world = World(EngineConfig(4, 32, 4, 8, 64, overlap=True))
    for number in range(4):
        cancel_at = 5 if number == 1 else None
        world.add(Wish(submit_of(f"r{number}", prompt(9, number), max_tokens=12), cancel_at=cancel_at))
    world.run()
    world.compare()


def _turns_of_neighbours(harmed: Wish) -> list[dict[int, int]]:
    """When each token of three requests comes that run beside this one."""
    world = World(EngineConfig(4, 32, 4, 8, 64, overlap=True))
    for number in range(3):
        world.add(Wish(submit_of(f"r{number}", prompt(9, number), max_tokens=12)))
    world.add(harmed)
    world.run()
    world.compare()
    return [world.records[key(f"r{number}")].turns for number in range(3)]


def test_f28_no_token_comes_later_because_a_neighbour_is_cancelled() -> None:
    neighbour = submit_of("n", prompt(9, 3), max_tokens=12)
    calm, harmed = _turns_of_neighbours(Wish(neighbour)), _turns_of_neighbours(Wish(neighbour, cancel_at=5))
    assert all(turns[at] <= calm[number][at] for number, turns in enumerate(harmed) for at in turns)


def test_f28_a_failed_transfer_whose_prompt_is_computed_here_takes_no_turn_from_its_neighbours() -> None:
    arriving = submit_of("n", prompt(24, 3), max_tokens=4, mode=Mode.AWAIT_KV)
    whole, half = Wish(arriving, at_turn=4), Wish(arriving, at_turn=4, received_share=0.5)
    assert _turns_of_neighbours(half) == _turns_of_neighbours(whole)


@pytest.mark.parametrize("field", ["block_size", "num_blocks", "max_num_seqs", "max_model_len"])
def test_a_wrong_limit_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        engine_of(**{field: 0})


def test_a_budget_below_one_token_for_each_sequence_is_named() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3; it must be at least max_num_seqs"):
        engine_of(max_num_batched_tokens=3)


def test_f15_a_reservation_waits_for_a_launched_step_that_may_still_write_into_its_blocks() -> None:
    config = EngineConfig(4, 2, 2, 8, 64, overlap=True, enable_prefix_caching=False)
    runner = FakeRunner(config)
    scheduler = Scheduler(config, runner.owner_words)
    scheduler.take(submit_of("ends", prompt(4), stop_token_ids=(next_token(prompt(4)),)))
    first, late = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert late is not None
    scheduler.settle(first, StepResult(np.array([next_token(prompt(4))])))
    scheduler.take(submit_of("d", prompt(8, 1), mode=Mode.AWAIT_KV))
    scheduler.take(ReserveKv(key("d"), 8))
    assert scheduler.plan() is None
    assert [event.key for event in scheduler.drain()] == ["ends"]
    scheduler.settle(late, StepResult(np.array([0])))
    assert scheduler.plan() is None
    assert [type(event) for event in scheduler.drain()] == [KvReserved]
    scheduler.check()


def test_f12_a_running_sequence_gives_its_seat_to_an_older_one_that_has_its_blocks() -> None:
    world = World(EngineConfig(2, 9, 1, 1, 17, enable_prefix_caching=False))
    world.add(Wish(submit_of("old", prompt(16), mode=Mode.AWAIT_KV, max_tokens=1), received_share=0, first_token=False))
    world.add(Wish(submit_of("new", prompt(2), max_tokens=2, ignore_eos=True)))
    world.run()
    world.compare()


def test_f12_of_two_that_received_their_kv_and_lack_a_block_the_older_one_runs() -> None:
    world = World(EngineConfig(1, 9, 1, 1, 8, enable_prefix_caching=False))
    for name, length in (("old", 5), ("new", 6)):
        wish = submit_of(name, prompt(length), mode=Mode.AWAIT_KV, max_tokens=1)
        world.add(Wish(wish, at_turn=3, hold_turns=4, received_share=0, first_token=False))
    world.run()
    world.compare()


def test_the_latest_that_holds_blocks_gives_way_even_when_it_only_waits_for_a_seat() -> None:
    engine, _ = engine_of(num_blocks=5, max_num_seqs=1, enable_prefix_caching=False)
    engine.take(submit_of("old", prompt(4), max_tokens=14, ignore_eos=True))
    engine.step()
    engine.take(submit_of("new", prompt(8, 1), mode=Mode.AWAIT_KV, max_tokens=1))
    engine.take(ReserveKv(key("new"), 8))
    engine.step()
    engine.take(StartFromKv(key("new"), 0))
    tokens = [event for event in drive(engine) if isinstance(event, TokenSampled)]
    assert [event.key for event in tokens] == ["old"] * 12 + ["new"]
    assert engine.status().preemptions == 1
