"""A decode node alone: a real process, a test client in the router's place."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from decant_proto.v1 import types_pb2
from forked_decant import ForkedDecant
from pd_golden import toy_answer, toy_prompt
from pd_nodes import NodeProcess, Start, all_blocks_are_back, eventually, fresh_interpreter, start_node, until_ready
from pd_router_client import RouterClient, attached, greedy, new_request_id

from bench.ports import free_ports
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from foundation.keys import draw_master_keys, write_key_file

pytestmark = pytest.mark.sockets

BLOCKS = 200
TRIES = 5
"""Where the machine keeps this process waiting, what is to be met under way may be over, and is begun again."""
SMALL = (f"--num-gpu-blocks-override={BLOCKS}", "--max-num-seqs=8", "--max-num-batched-tokens=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    write_toy_folder(folder / "toy")
    write_key_file(folder / "key", draw_master_keys())
    return folder


def start_toy(folder: Path, *options: str, start: Start = ForkedDecant) -> NodeProcess:
    return start_node("decode", folder, folder / "toy", folder / "key", *SMALL, *options, start=start)


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[NodeProcess]:
    node = start_toy(folder)
    try:
        asyncio.run(until_ready(node))
        yield node
    finally:
        node.end()


@pytest_asyncio.fixture
async def router(node: NodeProcess) -> AsyncIterator[RouterClient]:
    async with attached(node.control_address) as router:
        yield router
    await all_blocks_are_back(node, BLOCKS)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 300])
async def test_f19_tokens_of_the_toy_equal_its_arithmetic_cold_and_cached(router: RouterClient, length: int) -> None:
    prompt = toy_prompt(length, seed=length)
    expected = toy_answer(prompt, 6)
    for cached in (0, (length - 1) // 16 * 16):
        answer = await router.submit(prompt, greedy(6)).end(20)
        assert answer.tokens == expected
        assert answer.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert answer.account is not None
        assert (answer.account.cached, answer.account.computed) == (cached, length - cached)


async def test_a_pool_smaller_than_the_models_context_is_the_nodes_context(router: RouterClient) -> None:
    assert router.hello.max_model_len == BLOCKS * 16 + 1 < 4096


async def test_many_requests_at_once_are_each_answered_with_their_own_tokens(router: RouterClient) -> None:
    prompts = [toy_prompt(5 + 7 * number, seed=1000 + number) for number in range(20)]
    answers = [router.submit(prompt, greedy(12)) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (await answer.end(30)).tokens == toy_answer(prompt, 12)


async def test_f05_settled_tokens_are_history_and_are_not_drawn_again(router: RouterClient) -> None:
    prompt = toy_prompt(40, seed=1)
    whole = toy_answer(prompt, 10)
    answer = await router.submit(prompt, greedy(10), settled=whole[:4], attempt=2).end(20)
    assert answer.tokens == whole[4:]


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_f20_max_tokens_ends_the_answer(router: RouterClient, max_tokens: int) -> None:
    answer = await router.submit(toy_prompt(20, seed=2), greedy(max_tokens)).end(20)
    assert len(answer.tokens) == max_tokens


async def test_f20_a_stop_token_ends_the_answer_and_is_its_last(router: RouterClient) -> None:
    prompt = toy_prompt(20, seed=3)
    whole = toy_answer(prompt, 8)
    answer = await router.submit(prompt, greedy(8, stop_token_ids=[whole[3]])).end(20)
    assert answer.tokens == whole[: whole.index(whole[3]) + 1]
    assert answer.finish_reason == types_pb2.FINISH_REASON_STOP


async def test_logprobs_come_with_the_tokens(router: RouterClient) -> None:
    answer = await router.submit(toy_prompt(20, seed=4), greedy(3, logprobs=2)).end(20)
    assert all(logprob is not None and logprob <= 0 for logprob in answer.logprobs)


async def test_f10_a_cancelled_request_ends_and_frees_its_blocks_within_a_second(
    node: NodeProcess, router: RouterClient
) -> None:
    request_id = new_request_id()
    answer = router.submit(toy_prompt(100, seed=5), greedy(3000), request_id=request_id)
    await answer.has_tokens(3)
    router.cancel(request_id)
    await answer.end(5)
    assert answer.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    await all_blocks_are_back(node, BLOCKS, within_s=1)


async def test_f36_a_higher_attempt_supersedes_the_lower_and_the_lower_is_refused_afterwards(
    router: RouterClient,
) -> None:
    request_id, prompt = new_request_id(), toy_prompt(30, seed=6)
    old = router.submit(prompt, greedy(3000), request_id=request_id, attempt=1)
    await old.has_tokens(2)
    new = router.submit(prompt, greedy(5), request_id=request_id, attempt=2, settled=old.tokens[:2])
    await old.end(10)
    assert old.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert [*old.tokens[:2], *(await new.end(20)).tokens] == toy_answer(prompt, 5)


async def test_f36_a_router_that_is_gone_takes_its_requests_with_it(node: NodeProcess) -> None:
    async with attached(node.control_address, "leaving") as leaving:
        await leaving.submit(toy_prompt(100, seed=7), greedy(3000)).has_tokens(2)
    await all_blocks_are_back(node, BLOCKS, within_s=1)


async def test_the_deadline_ends_a_request_by_name(router: RouterClient) -> None:
    answer = await router.submit(toy_prompt(10, seed=8), greedy(3000), deadline_ms=150).end(20)
    assert (answer.finish_reason, answer.failure) == (types_pb2.FINISH_REASON_FAILED, "deadline")
    assert not answer.retryable


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], greedy(4), "prompt_empty"),
        ([TOY_VOCABULARY_SIZE], greedy(4), "token_outside_vocabulary"),
        ([1], greedy(0), "invalid_max_tokens"),
        ([1], types_pb2.SamplingParameters(temperature=float("nan"), max_tokens=4), "invalid_sampling"),
        ([1], types_pb2.SamplingParameters(max_tokens=4, presence_penalty=math.nan), "invalid_sampling"),
        ([1] * 4096, greedy(4), "prompt_too_long"),
    ],
)
async def test_what_can_never_be_served_is_refused_by_name_and_for_good(
    router: RouterClient, prompt: list[int], sampling: types_pb2.SamplingParameters, reason: str
) -> None:
    answer = await router.submit(prompt, sampling).end(10)
    assert (answer.failure, answer.retryable) == (reason, False)


async def test_beyond_its_limit_a_node_refuses_with_a_retry_hint(node: NodeProcess, router: RouterClient) -> None:
    for _ in range(TRIES):
        answers = [router.submit(toy_prompt(8, seed=number), greedy(60)) for number in range(100)]
        ended = [await answer.end(60) for answer in answers]
        refused = [answer for answer in ended if answer.failure == "overloaded"]
        assert len(refused) <= 100 - 8 * 8, "fewer where some had ended before all had come"
        assert not any(answer.failure for answer in ended[: 8 * 8])
        assert all(answer.retryable and answer.retry_after_ms > 0 for answer in refused)
        assert all(len(answer.tokens) == 60 for answer in ended if not answer.failure)
        if refused:
            return
    raise AssertionError("no request came while as many as may be were there")


async def test_metrics_count_what_was_served(node: NodeProcess, router: RouterClient) -> None:
    before = await node.metrics()
    await router.submit(toy_prompt(33, seed=9), greedy(5)).end(20)
    after = await node.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("prompt_tokens_total") == 33
    assert grown("generation_tokens_total") == 5
    assert grown("local_prefill_total", reason="no_prefill_node") == 1
    assert grown("request_success_total", reason="length") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 4


async def test_f23_a_drained_node_refuses_new_work_ends_what_runs_and_exits_cleanly(folder: Path) -> None:
    for _ in range(TRIES):
        node = start_toy(folder, start=fresh_interpreter)
        try:
            await until_ready(node)
            if await drained_in_mid_stream(node):
                return
        finally:
            node.end()
    raise AssertionError("every answer was over before the node was seen to drain")


async def drained_in_mid_stream(node: NodeProcess) -> bool:
    """False where the longer of two answers was over before all had been looked at."""
    async with attached(node.control_address) as router:
        running = router.submit(prompt := toy_prompt(50, seed=10), greedy(300))
        long_id = new_request_id()
        long = router.submit(toy_prompt(50, seed=11), greedy(2200), request_id=long_id)
        for answer in (running, long):
            await answer.has_tokens(2)
        node.send(signal.SIGTERM)

        async def draining() -> bool:
            return router.status.draining or long.ended.is_set()

        await eventually(draining, 5, "the router was told")
        health = await node.health()
        live, _ = await asyncio.to_thread(node.get, "/live")
        refused = router.submit([1, 2, 3], greedy(4))

        async def answered() -> bool:
            return refused.ended.is_set() or router.stream_ended.is_set()

        await eventually(answered, 5, "new work is answered")
        if long.ended.is_set():
            assert (long.failure, len(long.tokens)) == ("", 2200)
            return False
        assert (health, live) == ((503, ["draining"]), 200)
        assert (refused.failure, refused.retryable) == ("draining", True)
        assert refused.retry_after_ms > 0
        assert (await running.end(30)).tokens == toy_answer(prompt, 300)
        router.cancel(long_id)
        assert await node.exit_code(60) == 0
        return True


async def test_f23_work_that_outlasts_the_grace_period_is_given_up(folder: Path) -> None:
    for _ in range(TRIES):
        node = start_toy(folder, "--drain-grace-s=1")
        try:
            await until_ready(node)
            async with attached(node.control_address) as router:
                running = router.submit(toy_prompt(50, seed=10), greedy(4000))
                await running.has_tokens(2)
                node.send(signal.SIGTERM)
                assert await node.exit_code(60) == 0
            if "drain grace is over" in node.log():
                return
            assert len(running.tokens) > 3000, "it was whole before the grace was over"
        finally:
            node.end()
    raise AssertionError("every answer was over before the grace")


@pytest.mark.parametrize("setting", ["control-port", "http-port", "data-port"])
def test_f32_a_port_in_use_ends_the_start_and_names_the_setting(node: NodeProcess, folder: Path, setting: str) -> None:
    ports = dict(zip(("control-port", "data-port", "http-port"), free_ports(3), strict=True))
    ports[setting] = node.ports.http
    command = [sys.executable, "-m", "decant", "decode", f"--model={folder / 'toy'}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"--{setting}" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
