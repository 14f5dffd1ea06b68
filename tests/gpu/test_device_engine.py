"""The device runner: against the host's, its modes against each other, ahead of the host against one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_model import BLOCK_SIZE, BLOCKS, DEVICE, VOCABULARY, WEIGHTS_SEED, build, decodes, write_config
from step_plans import batch_plan, greedy_rows

from engine.attention.paged import PagedAttention
from engine.build import BuildOptions
from engine.build_device import DeviceEngineParts, build_device_engine
from engine.executor.inputs import step_inputs
from engine.graphs.select import Choice, Costs, GraphSelector, Mode, Reason
from engine.kv_cache.storage import KvStorage
from engine.loop import Engine
from engine.model.config import read_model_config
from engine.model.loader import DummyTensors, build_decoder
from engine.port import RequestKey, SamplingParameters, Submit, TokenSampled
from engine.step import StepPlan, TokenMasks
from foundation.kv_layout import KvLayout

pytestmark = pytest.mark.gpu


@dataclass
class Made:
    parts: DeviceEngineParts
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("model")
    parts = build(folder)
    yield Made(parts, folder)
    parts.runner.close()


def host_logits(made: Made, plans: list[StepPlan]) -> list[torch.Tensor]:
    """The definition on the host, in float32, on the same weights: logits of each plan's drawing tokens."""
    config = read_model_config(made.folder)

    class OnHost(DummyTensors):
        def get(self, name: str) -> torch.Tensor:
            return super().get(name).bfloat16().float().cpu()

    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, "float32", BLOCK_SIZE, "HND", config.layers)
    decoder = build_decoder(config, OnHost(config, WEIGHTS_SEED, DEVICE), torch.float32, torch.device("cpu"), 1024)
    attention = PagedAttention(KvStorage(layout, BLOCKS), config.heads, torch.float32)
    out = []
    for plan in plans:
        inputs = step_inputs(plan, None, torch.device("cpu"))
        out.append(decoder.forward(inputs.token_ids, inputs.positions, attention.prepare(plan), inputs.wanted_tokens))
    return out


def mixed_plans() -> list[StepPlan]:
    """Prompts in chunks beside decodes, then decodes alone; every row's log probabilities are wanted."""
    rng = np.random.default_rng(2)
    tables = np.random.default_rng(2).permutation(BLOCKS)[:60].reshape(3, 20).tolist()
    steps = [
        [(33, 0, 0), (100, 0, 1)],
        [(1, 33, 0), (57, 100, 1), (16, 0, 2)],
        [(1, 34, 0), (1, 157, 1), (3, 16, 2)],
        [(1, 35, 0), (1, 158, 1), (1, 19, 2)],
        [(1, 36, 0), (1, 159, 1), (1, 20, 2)],
    ]
    plans = []
    for number, rows in enumerate(steps):
        made = [(rng.integers(0, VOCABULARY, count).tolist(), first, tables[table]) for count, first, table in rows]
        positions = [first + count for count, first, _ in rows]
        plans.append(batch_plan(number, made, BLOCK_SIZE, sampling=greedy_rows(len(rows), positions, logprobs=20)))
    return plans


def test_log_probabilities_equal_the_definition_on_the_host_within_rounding(made: Made) -> None:
    plans = mixed_plans()
    for plan, logits in zip(plans, host_logits(made, plans), strict=True):
        result = made.parts.runner.launch(plan).result()
        assert result.top_logprobs is not None
        assert result.top_token_ids is not None
        want = logits.log_softmax(-1).gather(1, torch.from_numpy(result.top_token_ids)).numpy()
        np.testing.assert_allclose(result.top_logprobs, want, atol=0.12)
        assert np.abs(result.top_logprobs - want).mean() < 0.03


def test_full_piecewise_and_eager_steps_agree_within_rounding(made: Made) -> None:
    runner = made.parts.runner
    for plan in mixed_plans():
        eager = runner.launch_as(plan, Choice(Mode.EAGER, plan.tokens, Reason.NONE)).result()
        others = [Choice(Mode.PIECEWISE, 256 if plan.tokens > 128 else 128 if plan.tokens > 64 else 64, Reason.NONE)]
        if plan.tokens == plan.rows:
            others += [Choice(Mode.FULL, 4, Reason.NONE), Choice(Mode.FULL, 16, Reason.NONE)]
        for choice in others:
            got = runner.launch_as(plan, choice).result()
            assert got.top_logprobs is not None
            assert eager.top_logprobs is not None
            np.testing.assert_allclose(got.top_logprobs, eager.top_logprobs, atol=0.1, err_msg=str(choice))


def test_a_chunk_that_draws_nothing_stores_its_kv(made: Made) -> None:
    runner, ids = made.parts.runner, list(range(40, 140))
    chunks = [(ids[:70], 0), (ids[70:71], 70), (ids[71:], 71)]
    for number, (chunk, first) in enumerate(chunks):
        last = first + len(chunk) == len(ids)
        sampling = greedy_rows(int(last), [100] * last, logprobs=5)
        plan = batch_plan(number, [(chunk, first, range(30, 40))], BLOCK_SIZE, sample=[last], sampling=sampling)
        in_chunks = runner.launch(plan).result()
        assert len(in_chunks.token_ids) == int(last)
    sampling = greedy_rows(1, [100], logprobs=5)
    whole = runner.launch(batch_plan(9, [(ids, 0, range(50, 60))], BLOCK_SIZE, sampling=sampling)).result()
    assert whole.top_logprobs is not None
    assert in_chunks.top_logprobs is not None
    np.testing.assert_allclose(in_chunks.top_logprobs, whole.top_logprobs, atol=0.1)


def test_steps_launched_while_the_stream_is_held_back_equal_serial_ones(made: Made) -> None:
    runner, rows, steps = made.parts.runner, 20, 40
    serial = [
        runner.launch(decodes(step, step, rows, fed=step > 0)).result().token_ids.tolist() for step in range(steps)
    ]
    ahead, launched = [], []
    for step in range(steps):
        with torch.cuda.stream(runner._stream):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        launched.append(runner.launch(decodes(step, step, rows, fed=step > 0)))
        if len(launched) == 2:
            ahead.append(launched.pop(0).result().token_ids.tolist())
    ahead.append(launched.pop(0).result().token_ids.tolist())
    assert ahead == serial
    assert len({tuple(tokens) for tokens in serial}) > steps // 2


@pytest.mark.parametrize("graphs", [True, False])
def test_the_loop_never_waits_for_the_device_but_for_results(made: Made, graphs: bool) -> None:
    """Random prompts, greedy and sampled, with log probabilities and banned stop tokens; a hidden synchronisation raises."""
    parts, rng = made.parts, np.random.default_rng(4)
    chosen = parts.runner.selector
    if not graphs:
        parts.runner.selector = GraphSelector(Costs())
    config = replace(parts.config, max_num_batched_tokens=200)
    engine = Engine(config, parts.runner, np.zeros(BLOCKS, np.uint64))
    for index in range(30):
        sampling = SamplingParameters(
            seed=index,
            max_tokens=int(rng.integers(2, 40)),
            temperature=float(index % 3) / 2,
            top_p=0.9 if index % 4 == 0 else 1.0,
            min_tokens=2,
            logprobs=3 if index % 5 == 0 else None,
            presence_penalty=0.5 if index % 6 == 0 else 0.0,
        )
        prompt = tuple(rng.integers(0, VOCABULARY - 1, int(rng.integers(1, 90))).tolist())
        engine.take(Submit(RequestKey(str(index)), prompt, sampling))
    finished = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(600):
            events = engine.step()
            finished += sum(isinstance(event, TokenSampled) and event.finish_reason is not None for event in events)
            if not engine.status().has_work:
                break
    finally:
        torch.cuda.set_sync_debug_mode("default")
        statistics, parts.runner.selector = parts.runner.selector.statistics, chosen
    assert finished == 30
    engine.scheduler.check()
    used = {mode for mode, _ in statistics.steps}
    assert used >= ({Mode.FULL} if graphs else {Mode.EAGER})
    assert graphs or used == {Mode.EAGER}


def test_a_step_with_masks_waits_for_nothing_and_draws_what_they_allow(made: Made) -> None:
    allowed = np.zeros((2, -(-VOCABULARY // 32) * 32), bool)
    allowed[0, 7] = allowed[1, 9] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    plan = decodes(0, 0, 4, fed=False)
    plan = replace(plan, sampling=replace(plan.sampling, masks=TokenMasks(np.array([1, 3]), words)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = made.parts.runner.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.result().token_ids[[1, 3]].tolist() == [7, 9]


def test_not_finite_logits_fail_the_step_and_all_after_it(made: Made, tmp_path: Path) -> None:
    from engine.executor.runner import StepFailed

    write_config(tmp_path, num_hidden_layers=2)
    options = BuildOptions(model=tmp_path, load_format="dummy", num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64)
    parts = build_device_engine(options, DEVICE)
    parts.runner.launch(batch_plan(0, [([1, 2, 3], 0, [0])], 16)).result()
    parts.storage.memory[:, 0] = float("nan")
    with pytest.raises(StepFailed, match="not finite"):
        parts.runner.launch(batch_plan(1, [([6], 3, [0])], 16)).result()
    with pytest.raises(StepFailed, match="follows a failed step"):
        parts.runner.launch(batch_plan(2, [([6], 0, [4])], 16)).result()
