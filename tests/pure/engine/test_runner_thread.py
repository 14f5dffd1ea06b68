"""The executor thread: order, feedback, failures, and memory that holds garbage."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from step_plans import batch_plan, greedy_rows

from engine.build import BuildOptions, EngineParts, build_engine
from engine.executor.runner import StepFailed, ThreadRunner
from engine.step import StepPlan, StepResult
from foundation.errors import ConfigurationError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": [5, 6],
}


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[EngineParts]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made = build_engine(
        BuildOptions(model=tmp_path, load_format="dummy", seed=3, num_blocks=32, block_size=4, linear_forms="plain")
    )
    yield made
    made.runner.close()


def test_build_takes_limits_and_stop_tokens_from_the_folder(parts: EngineParts) -> None:
    assert parts.config.eos_token_ids == (5, 6)
    assert parts.config.max_model_len == 128
    assert parts.fingerprint.weights.startswith("dummy:")
    assert parts.fingerprint.tokenizer == "none"
    assert len(parts.storage.owner_words) == parts.config.num_blocks == 32


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"max_model_len": 129}, "--max-model-len"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 10}, "--kv-cache-memory-bytes"),
        ({"kv_layer_group": 3}, "--kv-layer-group"),
        ({"pipeline_parallel_size": 5}, "--pipeline-parallel-size"),
        ({"tensor_parallel_size": -1}, "--tensor-parallel-size"),
        ({"load_format": "auto"}, "--model"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], setting: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    options = {"model": tmp_path, "load_format": "dummy", "num_blocks": 4, "linear_forms": "plain"} | changes
    with pytest.raises(ConfigurationError) as refused:
        build_engine(BuildOptions(**options))  # type: ignore[arg-type]
    assert refused.value.setting == setting


def test_tokens_fed_back_equal_tokens_given(parts: EngineParts) -> None:
    first = parts.runner.launch(batch_plan(0, [([1, 2, 3], 0, [0, 1]), ([4, 5], 0, [2, 3])], 4))
    swapped = parts.runner.launch(batch_plan(1, [([0], 2, [2, 3]), ([0], 3, [0, 1])], 4, feedback=[1, 0]))
    a, b = first.result().token_ids.tolist()
    fed = swapped.result().token_ids.tolist()
    given = parts.runner.launch(batch_plan(2, [([b], 2, [2, 3]), ([a], 3, [0, 1])], 4)).result().token_ids.tolist()
    assert fed == given


def test_a_chunk_that_samples_nothing_gives_no_tokens_and_stores_its_kv(parts: EngineParts) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    silent = parts.runner.launch(batch_plan(0, [(ids[:5], 0, [7, 9])], 4, sample=[False])).result()
    assert len(silent.token_ids) == 0
    in_chunks = parts.runner.launch(batch_plan(1, [(ids[5:], 5, [7, 9])], 4, sampling=greedy_rows(1, [8], logprobs=2)))
    at_once = parts.runner.launch(batch_plan(2, [(ids, 0, [11, 12])], 4, sampling=greedy_rows(1, [8], logprobs=2)))
    ours, whole = in_chunks.result(), at_once.result()
    assert ours.token_ids.tolist() == whole.token_ids.tolist()
    assert ours.top_logprobs is not None
    assert whole.top_logprobs is not None
    np.testing.assert_allclose(ours.top_logprobs, whole.top_logprobs, atol=1e-4)


def test_nan_in_memory_that_nobody_reads_changes_no_token(parts: EngineParts) -> None:
    ids = [3, 1, 4, 1, 5]
    rows = [(ids, 0, [7, 9]), ([8, 8, 8, 8, 8, 8, 8, 8, 8], 0, [1, 2, 3])]
    nexts = [([2], 5, [7, 9]), ([2], 9, [1, 2, 3])]
    tokens = []
    for garbage in (0.0, np.nan):
        for pool in parts.storage.pool_views():
            pool.view(np.float32)[:] = garbage
        parts.runner.launch(batch_plan(0, rows, 4)).result()
        tokens.append(parts.runner.launch(batch_plan(1, nexts, 4)).result().token_ids.tolist())
    assert tokens[0] == tokens[1]


def test_nan_in_a_context_fails_the_step_and_all_after_it(parts: EngineParts) -> None:
    parts.runner.launch(batch_plan(0, [([1, 2, 3, 4, 5], 0, [0, 1])], 4)).result()
    parts.storage.pool_views()[0][:, 0].view(np.float32)[:] = np.nan
    with pytest.raises(StepFailed, match="not finite"):
        parts.runner.launch(batch_plan(1, [([6], 5, [0, 1])], 4)).result()
    with pytest.raises(StepFailed, match="follows a failed step"):
        parts.runner.launch(batch_plan(2, [([6], 0, [4])], 4)).result()


class _RecordingProgram:
    """A fake program: notes which plans ran on which thread, and waits until it may go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ran: list[tuple[int, str]] = []

    def run(self, plan: StepPlan) -> StepResult:
        assert self.go_on.wait(timeout=30)
        self.ran.append((plan.number, threading.current_thread().name))
        return StepResult(np.array([plan.number], np.int64))


def test_launch_returns_before_the_step_and_steps_run_in_launch_order_on_one_thread() -> None:
    program = _RecordingProgram()
    runner = ThreadRunner(program)
    launched = [runner.launch(batch_plan(number, [([1], 0, [0])], 4)) for number in range(3)]
    assert program.ran == []
    program.go_on.set()
    assert [step.result().token_ids.tolist() for step in launched] == [[0], [1], [2]]
    assert program.ran == [(number, "executor") for number in range(3)]
    runner.close()
    runner.close()
