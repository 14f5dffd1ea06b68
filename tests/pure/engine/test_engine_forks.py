"""Choices of one prompt share its KV: what is computed, what is copied, and the tokens that each would have drawn alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_world import Wish, World, submit_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_random_loads import configs

from engine.build import BuildOptions, build_engine
from engine.config import EngineConfig
from engine.loop import Engine
from engine.model.toy import write_toy_folder
from engine.port import Mode, RequestKey, SamplingParameters, Submit, TokenSampled

CONFIG = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(i * i % 23 for i in range(length))


def fork(name: str, of: Submit, **changes: object) -> Submit:
    return replace(of, key=RequestKey(name), mode=Mode.GENERATE, fork_of=of.key, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_is_computed_once_for_all_its_choices(length: int, caches: bool, overlap: bool) -> None:
    world = World(replace(CONFIG, enable_prefix_caching=caches, overlap=overlap))
    leader = submit_of("leader", prompt(length), max_tokens=6)
    world.add(Wish(leader))
    for number in range(3):
        world.add(Wish(fork(f"fork {number}", leader)))
    world.run()
    world.compare()
    plans = world.runner.launched
    # Each choice computes five of its six tokens' positions, and each fork the prompt's last one once more.
    computed = sum(plan.tokens for plan in plans)
    assert length + 4 * 5 + 3 <= computed <= length + 4 * 6 + 3  # an overlapped step may run beyond an end
    assert sum(len(plan.block_copies) for plan in plans) == (3 if (length - 1) % 4 else 0)
    for number in range(3):
        assert world.records[RequestKey(f"fork {number}")].account == (length - 1, 0, 1)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("first_token", [True, False])
def test_choices_share_what_a_transfer_brought(share: float, first_token: bool) -> None:
    world = World(replace(CONFIG, enable_prefix_caching=False))
    leader = submit_of("leader", prompt(13), mode=Mode.AWAIT_KV, max_tokens=6)
    world.add(Wish(leader, hold_turns=3, received_share=share, first_token=first_token))
    for number in range(4):
        world.add(Wish(fork(f"fork {number}", leader), at_turn=number % 2))
    world.run()
    world.compare()
    for number in range(4):
        assert world.records[RequestKey(f"fork {number}")].account == (12, 0, 1)


def test_a_fork_with_settled_tokens_shares_the_prompt_and_computes_the_rest() -> None:
    world = World(replace(CONFIG, enable_prefix_caching=False))
    leader = submit_of("leader", prompt(10), max_tokens=9, settled=(3, 4))
    world.add(Wish(leader))
    world.add(Wish(fork("fork", leader, settled=(5, 6, 8))))
    world.run()
    world.compare()
    assert world.records[RequestKey("fork")].account == (10, 0, 3)


def test_nothing_is_shared_with_another_prompt_or_with_one_that_is_gone() -> None:
    world = World(replace(CONFIG, enable_prefix_caching=False))
    leader = submit_of("leader", prompt(10), max_tokens=9)
    world.add(Wish(leader))
    world.add(Wish(replace(fork("other", leader), prompt=(22, *prompt(10)[1:]))))
    world.add(Wish(replace(fork("orphan", leader), fork_of=RequestKey("nobody"))))
    world.run()
    world.compare()
    for name in ("other", "orphan"):
        assert world.records[RequestKey(name)].account == (0, 0, 10)
    assert not any(len(plan.block_copies) for plan in world.runner.launched)


def test_choices_whose_leader_ends_before_its_kv_has_come_are_answered_all_the_same() -> None:
    world = World(CONFIG)
    leader = submit_of("leader", prompt(10), mode=Mode.AWAIT_KV, max_tokens=9)
    world.add(Wish(leader, hold_turns=6, cancel_at=4))
    for number in range(3):
        world.add(Wish(fork(f"fork {number}", leader)))
    world.run()
    world.compare()
    assert all(world.records[RequestKey(f"fork {number}")].finish is not None for number in range(3))


def cancels(at_turn: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(at_turn, at_turn + 15)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_f12_any_families_on_any_pool_end_with_the_tokens_that_histories_determine(data: st.DataObject) -> None:
    world = World(data.draw(configs()))
    for number in range(data.draw(st.integers(1, 3))):
        at_turn = data.draw(st.integers(0, 6))
        leader = submit_of(
            f"leader {number}",
            prompt(data.draw(st.integers(1, 30))),
            mode=data.draw(st.sampled_from((Mode.GENERATE, Mode.AWAIT_KV))),
            max_tokens=data.draw(st.integers(1, 10)),
        )
        share, first_token = data.draw(st.sampled_from((0.0, 0.5, 1.0))), data.draw(st.booleans())
        hold = data.draw(st.integers(0, 5))
        world.add(Wish(leader, at_turn, data.draw(cancels(at_turn)), hold, share, first_token))
        source = leader
        for choice in range(data.draw(st.integers(0, 4))):
            settled = data.draw(st.lists(st.integers(8, 20), max_size=min(2, leader.sampling.max_tokens - 1)))
            member = fork(f"fork {number} {choice}", source, settled=tuple(settled))
            member_at = at_turn + data.draw(st.integers(0, 4))
            world.add(Wish(member, member_at, data.draw(cancels(member_at))))
            if data.draw(st.booleans()):
                source = member
    world.run()
    world.compare()
    allowed = {"prompt_too_long", "prompt_exceeds_kv_cache"}
    assert {record.failure for record in world.records.values()} <= {None, *allowed}


def test_each_choice_draws_what_it_would_draw_alone(tmp_path: Path) -> None:
    """With the toy model, whose logits are a hash of all the KV bytes of the context."""
    folder = write_toy_folder(tmp_path / "toy")

    def answers(together: bool) -> dict[int, list[int]]:
        parts = build_engine(BuildOptions(model=folder, num_blocks=200, block_size=4, enable_prefix_caching=False))
        engine = Engine(parts.config, parts.runner, parts.storage.owner_words)
        sampling = SamplingParameters(seed=5, max_tokens=24, temperature=1.0, ignore_eos=True)
        found: dict[int, list[int]] = {choice: [] for choice in range(5)}
        for choice in found:
            fork_of = RequestKey("0") if together and choice else None
            engine.take(
                Submit(RequestKey(str(choice)), tuple(range(30, 51)), sampling, choice_index=choice, fork_of=fork_of)
            )
        while True:
            for event in engine.step():
                assert isinstance(event, TokenSampled)
                found[int(event.key)].append(event.token_id)
            if not engine.status().has_work:
                engine.close()
                return found

    together = answers(together=True)
    assert together == answers(together=False)
    assert len({tuple(answer) for answer in together.values()}) == 5


def test_the_copies_of_one_plan_depend_on_no_order() -> None:
    """A fork of a fork in the same step would copy a block that is itself being copied."""
    world = World(replace(CONFIG, enable_prefix_caching=False))
    leader = submit_of("0", prompt(7), max_tokens=8)
    world.add(Wish(leader))
    member = leader
    for number in range(1, 5):
        member = fork(str(number), member)
        world.add(Wish(member))
    world.run()
    world.compare()
    for plan in world.runner.launched:
        sources, targets = plan.block_copies[:, 0], plan.block_copies[:, 1]
        assert not np.isin(sources, targets).any()
