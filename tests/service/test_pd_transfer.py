"""From a prefill node to a decode node over UCX: real processes, a test client in the router's place."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from decant_proto.v1 import node_pb2, types_pb2
from llguidance import LLMatcher
from pd_golden import TOY_LAYOUT, toy_answer, toy_prompt
from pd_nodes import Metrics, NodeProcess, all_blocks_are_back, eventually, start_node, until_ready
from pd_router_client import attached, greedy, new_request_id, prefill_choice
from pd_world import BLOCKS, PATIENT, SMALL, Pair

from engine.model.toy import write_toy_folder
from foundation.keys import MasterKeys, draw_master_keys, write_key_file

pytestmark = pytest.mark.sockets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pd")
    write_toy_folder(folder / "toy")
    return folder


@pytest.fixture(scope="module")
def keys(folder: Path) -> MasterKeys:
    keys = draw_master_keys()
    write_key_file(folder / "key", keys)
    return keys


@pytest.fixture(scope="module")
def nodes(folder: Path, keys: MasterKeys) -> Iterator[dict[str, NodeProcess]]:
    """p: a prefill node; d: a decode node; forgetful: a decode node without a prefix cache."""

    def start(role: str, *options: str) -> NodeProcess:
        return start_node(role, folder, folder / "toy", folder / "key", *SMALL, PATIENT, *options)

    nodes = {"p": start("prefill"), "d": start("decode"), "forgetful": start("decode", "--no-enable-prefix-caching")}
    try:
        asyncio.run(until_ready(*nodes.values()))
        yield nodes
    finally:
        for node in nodes.values():
            node.end()


@pytest_asyncio.fixture
async def pair(nodes: dict[str, NodeProcess], keys: MasterKeys) -> AsyncIterator[Pair]:
    async with (
        attached(nodes["p"].control_address) as p,
        attached(nodes["d"].control_address) as d,
        attached(nodes["forgetful"].control_address) as forgetful,
    ):
        yield Pair(keys, nodes, {"p": p, "d": d, "forgetful": forgetful})
    for node in nodes.values():
        await all_blocks_are_back(node, BLOCKS)


async def exactly_moved(pair: Pair, decode: str, before: tuple[Metrics, Metrics], expected: int) -> None:
    """So many payload bytes have landed on D since `before`, and have left P, which may hear of it after D has answered."""
    name, (p, d) = "kv_transfer_bytes_total", before
    assert (await pair.metrics(decode)).value(name) - d.value(name) == expected

    async def sent() -> bool:
        return (await pair.metrics("p")).value(name) - p.value(name) >= expected

    await eventually(sent, 10, f"{expected} bytes have left the prefill node")
    assert (await pair.metrics("p")).value(name) - p.value(name) == expected


@pytest.mark.parametrize(
    ("length", "held_by_decode"),
    [(length, held) for length in (1, 15, 16, 17, 64) for held in (0, 1, 2, 3, 4) if 16 * held <= length],
)
async def test_f19_only_what_the_decode_node_lacks_travels_to_the_byte(
    pair: Pair, length: int, held_by_decode: int
) -> None:
    prompt = toy_prompt(length, seed=1000 * length + held_by_decode)
    if held_by_decode:
        await pair.submit(prompt[: 16 * held_by_decode], greedy(1), prefill=()).end(20)
    before = await pair.metrics("p"), await pair.metrics("d")
    answer = await pair.submit(prompt, greedy(6)).end(20)
    assert answer.tokens == toy_answer(prompt, 6), answer.failure
    assert answer.account is not None
    assert answer.account.cached == 16 * held_by_decode
    assert answer.account.cached + answer.account.transferred + answer.account.computed == length
    lacked = length - 16 * held_by_decode
    assert answer.account.transferred == lacked
    await exactly_moved(pair, "d", before, lacked * TOY_LAYOUT.token_bytes)


@pytest.mark.parametrize("length", [16, 17, 64])
async def test_f19_what_the_prefill_node_holds_is_not_computed_again(pair: Pair, length: int) -> None:
    prompt = toy_prompt(length, seed=7000 + length)
    expected = toy_answer(prompt, 6)
    for cached_on_prefill in (0, length // 16 * 16):
        before = await pair.metrics("p"), await pair.metrics("forgetful")
        answer = await pair.submit(prompt, greedy(6), decode="forgetful").end(20)
        assert answer.tokens == expected, answer.failure
        after = await pair.metrics("p")
        found = after.value("prefix_cached_tokens_total") - before[0].value("prefix_cached_tokens_total")
        assert found == cached_on_prefill
        await exactly_moved(pair, "forgetful", before, length * TOY_LAYOUT.token_bytes)


async def test_many_transfers_at_once_are_each_answered_with_their_own_tokens(pair: Pair) -> None:
    prompts = [toy_prompt(5 + 17 * number, seed=2000 + number) for number in range(12)]
    answers = [pair.submit(prompt, greedy(10)) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (await answer.end(30)).tokens == toy_answer(prompt, 10), answer.failure
        assert answer.account is not None
        assert answer.account.computed == 0


async def test_a_long_prompt_travels_in_many_parcels_while_it_is_computed(pair: Pair) -> None:
    prompt = toy_prompt(900, seed=3)
    answer = await pair.submit(prompt, greedy(4)).end(30)
    assert answer.tokens == toy_answer(prompt, 4), answer.failure
    assert answer.account is not None
    assert answer.account.transferred == 900


async def test_sampled_tokens_do_not_depend_on_where_they_were_drawn(pair: Pair) -> None:
    sampling = types_pb2.SamplingParameters(temperature=0.9, top_p=0.95, seed=99, max_tokens=12, ignore_eos=True)
    prompt = toy_prompt(50, seed=4)
    alone = await pair.submit(prompt, sampling, prefill=()).end(20)
    apart = await pair.submit(prompt, sampling, decode="forgetful").end(20)
    assert apart.tokens == alone.tokens


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.25},
    {"presence_penalty": -1.5, "frequency_penalty": -0.5},
    {"logit_bias": {7: 50.0, 9: -100.0}},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.75, "logit_bias": {7: 3.0}, "temperature": 0.75},
]


@pytest.mark.parametrize("changes", PENALTIES, ids=lambda changes: "+".join(changes))
async def test_penalties_and_bias_act_alike_wherever_a_token_is_drawn(pair: Pair, changes: dict[str, Any]) -> None:
    sampling = types_pb2.SamplingParameters(seed=5, max_tokens=16, ignore_eos=True)
    sampling.MergeFrom(types_pb2.SamplingParameters(**changes))
    prompt = toy_prompt(50, seed=14)
    alone = await pair.submit(prompt, sampling, prefill=()).end(20)
    assert len(alone.tokens) == 16, alone.failure
    assert alone.tokens != toy_answer(prompt, 16)
    apart = await pair.submit(prompt, sampling, decode="forgetful").end(20)
    assert apart.account is not None
    assert apart.account.transferred == 50
    assert apart.tokens == alone.tokens
    resumed = await pair.submit(prompt, sampling, decode="forgetful", settled=alone.tokens[:7]).end(20)
    assert resumed.tokens == alone.tokens[7:]


async def test_a_grammar_is_applied_by_the_decode_node_wherever_the_prompt_was_computed(pair: Pair) -> None:
    grammar = LLMatcher.grammar_from_regex("[a-f]{3,5}( [a-f]{3,5}){3}")
    sampling = types_pb2.SamplingParameters(temperature=1.0, seed=5, max_tokens=40, grammar=grammar)
    prompt = toy_prompt(50, seed=15)
    alone = await pair.submit(prompt, sampling, prefill=()).end(20)
    assert alone.finish_reason == types_pb2.FINISH_REASON_STOP, alone.failure
    apart = await pair.submit(prompt, sampling, decode="forgetful").end(20)
    assert apart.account is not None
    assert apart.account.transferred > 0
    assert apart.tokens == alone.tokens
    resumed = await pair.submit(prompt, sampling, decode="forgetful", settled=alone.tokens[:6]).end(20)
    assert resumed.tokens == alone.tokens[6:]
    wrong = types_pb2.SamplingParameters(temperature=1.0, seed=5, max_tokens=4, grammar="garbage(((")
    refused = await pair.submit(prompt, wrong).end(20)
    assert (refused.failure, refused.retryable) == ("invalid_grammar", False)


async def test_f05_settled_tokens_are_part_of_what_is_asked_for(pair: Pair) -> None:
    prompt = toy_prompt(40, seed=5)
    whole = toy_answer(prompt, 10)
    answer = await pair.submit(prompt, greedy(10), settled=whole[:4]).end(20)
    assert answer.tokens == whole[4:], answer.failure
    assert answer.account is not None
    assert answer.account.transferred == 44


@pytest.mark.parametrize("stop", ["max_tokens", "stop_token"])
async def test_f20_a_first_token_that_ends_the_answer_ends_the_transfer_too(pair: Pair, stop: str) -> None:
    prompt = toy_prompt(200, seed=6)
    (first,) = toy_answer(prompt, 1)
    sampling = greedy(1) if stop == "max_tokens" else greedy(8, stop_token_ids=[first])
    answer = await pair.submit(prompt, sampling, decode="forgetful").end(20)
    assert answer.tokens == [first]
    expected = types_pb2.FINISH_REASON_LENGTH if stop == "max_tokens" else types_pb2.FINISH_REASON_STOP
    assert answer.finish_reason == expected
    for name in ("p", "forgetful"):
        await all_blocks_are_back(pair.nodes[name], BLOCKS, within_s=2)


async def test_f10_a_client_that_leaves_while_decoding_frees_both_nodes(pair: Pair) -> None:
    request_id = new_request_id()
    answer = pair.submit(toy_prompt(100, seed=7), greedy(3000), request_id=request_id)
    await answer.has_tokens(5)
    pair.routers["d"].cancel(request_id)
    await answer.end(5)
    for name in ("p", "d"):
        await all_blocks_are_back(pair.nodes[name], BLOCKS, within_s=1)


async def test_f10_clients_that_leave_at_any_moment_leave_nothing_behind(pair: Pair) -> None:
    answers = []
    for number in range(24):
        request_id = new_request_id()
        answers.append(pair.submit(toy_prompt(600, seed=8000 + number), greedy(50), request_id=request_id))
        await asyncio.sleep(0.002 * (number % 8))  # spreads the cancels over queueing, prefilling, travelling, decoding
        pair.routers["d"].cancel(request_id)
    for answer in answers:
        await answer.end(10)
    for name in ("p", "d"):
        await all_blocks_are_back(pair.nodes[name], BLOCKS, within_s=2)
    prompt = toy_prompt(60, seed=9)
    assert (await pair.submit(prompt, greedy(5)).end(20)).tokens == toy_answer(prompt, 5)


async def test_f18_without_a_good_ticket_nothing_is_given_and_the_prompt_is_computed_locally(pair: Pair) -> None:
    prompt, request_id = toy_prompt(40, seed=10), new_request_id()
    choice = prefill_choice(draw_master_keys(), pair.routers["d"], pair.routers["p"], request_id, prompt)
    before = await pair.metrics("d")
    answer = await pair.routers["d"].submit(prompt, greedy(4), choices=[choice], request_id=request_id).end(20)
    assert answer.tokens == toy_answer(prompt, 4)
    after = await pair.metrics("d")
    refused = [metrics.value("local_prefill_total", reason="refused") for metrics in (before, after)]
    assert refused[1] - refused[0] == 1
    assert "ticket" in pair.nodes["d"].log()


async def test_f27_without_a_prefill_node_that_answers_the_decode_node_serves_alone(pair: Pair) -> None:
    prompt, request_id = toy_prompt(40, seed=11), new_request_id()
    gone = node_pb2.PrefillChoice(node_id="gone", control_address="127.0.0.1:1", ticket=b"x")
    answer = await pair.routers["d"].submit(prompt, greedy(4), choices=[gone], request_id=request_id).end(4)
    assert answer.tokens == toy_answer(prompt, 4)
    assert answer.account is not None
    assert answer.account.computed == 40


async def test_f27_the_next_prefill_node_of_the_list_is_asked_when_the_first_is_gone(pair: Pair) -> None:
    prompt, request_id = toy_prompt(40, seed=12), new_request_id()
    gone = node_pb2.PrefillChoice(node_id="gone", control_address="127.0.0.1:1", ticket=b"x")
    good = prefill_choice(pair.keys, pair.routers["d"], pair.routers["p"], request_id, prompt)
    answer = await pair.routers["d"].submit(prompt, greedy(4), choices=[gone, good], request_id=request_id).end(20)
    assert answer.tokens == toy_answer(prompt, 4)
    assert answer.account is not None
    assert answer.account.transferred == 40
    assert answer.account.prefill_node == pair.routers["p"].hello.entry.node_id


async def test_f26_the_lane_and_its_speed_are_logged_and_exported(pair: Pair) -> None:
    await pair.submit(toy_prompt(20, seed=13), greedy(2)).end(20)
    for name in ("p", "d"):
        status, text = await asyncio.to_thread(pair.nodes[name].get, "/metrics")
        assert status == 200
        assert "decant_kv_lane_gigabytes_per_second{" in text
        assert "lane measured" in pair.nodes[name].log()


async def test_prefill_nodes_tell_their_ticket_epoch_and_load(pair: Pair) -> None:
    router = pair.routers["p"]

    async def heard() -> bool:
        return router.status_changed.is_set()

    await eventually(heard, 10, "a status of the prefill node")
    assert router.status.ready
    assert router.status.blocks_total == BLOCKS


async def test_f17_garbage_on_every_port_harms_nobody(pair: Pair) -> None:
    noise = random.Random(17)
    for name in ("p", "d"):
        for port in pair.nodes[name].ports:
            for size in (1, 40, 5000):
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    continue  # over shared memory UCX does not listen on a decode node's data port
                writer.write(noise.randbytes(size))
                with contextlib.suppress(OSError):
                    await writer.drain()
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(100), 5)
                writer.close()
    prompt = toy_prompt(60, seed=17)
    answer = await pair.submit(prompt, greedy(5)).end(20)
    assert answer.tokens == toy_answer(prompt, 5), answer.failure
    assert answer.account is not None
    assert answer.account.transferred == 60
