"""Random loads over random pools: tokens equal the reference, books balance after every step, nothing waits for ever."""

from __future__ import annotations

import pytest
from engine_world import Wish, World, submit_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.port import Mode

EOS = 7


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return EngineConfig(
        block_size=draw(st.sampled_from((1, 2, 4, 5))),
        num_blocks=draw(st.integers(2, 24)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_model_len=draw(st.integers(8, 60)),
        enable_prefix_caching=draw(st.booleans()),
        overlap=draw(st.booleans()),
        eos_token_ids=(EOS,),
    )


# Few distinct prefixes, so that requests meet in the cache.
prompts = st.builds(
    lambda stem, length, tail: (*(stem * 60)[:length], *tail),
    st.sampled_from(((1, 2, 3), (1, 2, 4), (9,))),
    st.integers(0, 40),
    st.lists(st.integers(0, 22), min_size=1, max_size=3).map(tuple),
)


@st.composite
def wishes(draw: st.DrawFn, name: str) -> Wish:
    max_tokens = draw(st.integers(1, 12))
    at_turn = draw(st.integers(0, 12))
    settled = draw(st.lists(st.integers(8, 20), max_size=min(2, max_tokens - 1)).map(tuple))
    return Wish(
        submit_of(
            name,
            draw(prompts),
            mode=draw(st.sampled_from(tuple(Mode))),
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from((0, 0, 2))),
            settled=settled,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from(((), (3,)))),
        ),
        at_turn=at_turn,
        cancel_at=draw(st.none() | st.integers(at_turn, at_turn + 20)),
        hold_turns=draw(st.integers(0, 6)),
        received_share=draw(st.sampled_from((0.0, 0.5, 1.0))),
        first_token=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_f12_any_load_on_any_pool_ends_with_the_tokens_that_histories_determine(data: st.DataObject) -> None:
    world = World(data.draw(configs()))
    for number in range(data.draw(st.integers(1, 10))):
        world.add(data.draw(wishes(f"r{number}")))
    world.run()
    world.compare()
    allowed = {"prompt_too_long", "prompt_exceeds_kv_cache"}
    assert {record.failure for record in world.records.values()} <= {None, *allowed}


@pytest.mark.parametrize("overlap", [False, True])
def test_f12_twenty_long_prompts_on_a_pool_for_two_all_end(overlap: bool) -> None:
    config = EngineConfig(4, 24, 8, 16, 48, overlap=overlap)
    world = World(config)
    for number in range(20):
        mode = (Mode.GENERATE, Mode.PREFILL_ONLY, Mode.AWAIT_KV)[number % 3]
        prompt = tuple((number * 7 + i) % 23 for i in range(38))
        world.add(Wish(submit_of(f"r{number}", prompt, mode=mode), hold_turns=number % 4))
    world.run()
    world.compare()
    assert not any(record.failure for record in world.records.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_f11_a_storm_of_cancels_leaves_the_pool_as_it_was(overlap: bool) -> None:
    config = EngineConfig(4, 64, 16, 64, 64, overlap=overlap)
    world = World(config)
    for number in range(300):
        mode = (Mode.GENERATE, Mode.PREFILL_ONLY, Mode.AWAIT_KV)[number % 3]
        cancel_at = None if number % 10 == 0 else number // 20 + number % 5
        prompt = tuple((number * 3 + i) % 23 for i in range(20))
        world.add(Wish(submit_of(f"r{number}", prompt, mode=mode), at_turn=number // 20, cancel_at=cancel_at))
    world.run()
    world.compare()
