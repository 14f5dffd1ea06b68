"""The load of `decant bench graphs`, on a runner that computes nothing."""

from __future__ import annotations

from fake_runner import VOCABULARY, FakeRunner

from decant.bench_graphs import run_load
from decant.command_line import run
from engine.config import EngineConfig
from engine.loop import Engine


def test_every_request_of_the_load_ends_and_prompts_mix_with_decodes() -> None:
    config = EngineConfig(
        block_size=4, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=96, eos_token_ids=()
    )
    runner = FakeRunner(config)
    engine = Engine(config, runner, runner.owner_words)
    run_load(engine, most_positions=96, vocabulary_size=VOCABULARY, requests=20)
    status = engine.status()
    assert not status.has_work
    assert status.blocks_in_use == 0
    mixed = [plan for plan in runner.launched if 1 < plan.rows < plan.tokens]
    assert mixed, "no step held both decodes and a chunk of a prompt"


def test_bench_without_its_subject_says_how_it_is_called() -> None:
    assert run(["bench"], {}) == 2
