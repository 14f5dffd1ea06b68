"""Prefill to decode over UCX with the real model, against transformers' tokens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pd_golden import Golden
from pd_nodes import NodeProcess, all_blocks_are_back, eventually, start_node, until_ready
from pd_router_client import attached, greedy
from pd_world import Pair

from foundation.keys import MasterKeys, draw_master_keys, write_key_file

pytestmark = [pytest.mark.sockets, pytest.mark.model]

TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
BLOCKS = 128
HELD_PARCELS = 6
OPTIONS = (
    "--dtype=float32",
    f"--num-gpu-blocks-override={BLOCKS}",
    "--max-num-seqs=8",
    "--slot-bytes=256KiB",
    "--staging-bytes=16MiB",
)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def keys() -> MasterKeys:
    return draw_master_keys()


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path, keys: MasterKeys
) -> Iterator[dict[str, NodeProcess]]:
    folder = tmp_path_factory.mktemp("pd_real")
    write_key_file(folder / "key", keys)

    def start(role: str, faults: str = "") -> NodeProcess:
        return start_node(role, folder, default_model, folder / "key", *OPTIONS, faults=faults)

    nodes = {"p": start("prefill"), "d": start("decode"), "hold": start("prefill", f"hold_sends_from={HELD_PARCELS}")}
    try:
        asyncio.run(until_ready(*nodes.values()))
        yield nodes
    finally:
        for node in nodes.values():
            node.end()


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


async def pair_of(stack: AsyncExitStack, keys: MasterKeys, nodes: dict[str, NodeProcess]) -> Pair:
    routers = {
        name: await stack.enter_async_context(attached(node.control_address))
        for name, node in nodes.items()
        if node.process.poll() is None
    }
    return Pair(keys, nodes, routers)


@pytest.mark.parametrize("length", [15, 16, 17, 33, 300])
async def test_the_real_models_tokens_equal_transformers_and_its_kv_travels_to_the_byte(
    nodes: dict[str, NodeProcess], keys: MasterKeys, golden: Golden, length: int
) -> None:
    name = golden.of_length(length)
    async with AsyncExitStack() as stack:
        pair = await pair_of(stack, keys, nodes)
        before = await pair.metrics("d")
        answer = await pair.submit(golden.prompt(name), greedy(MAX_TOKENS)).end(60)
        after = await pair.metrics("d")
    assert len(answer.tokens) == MAX_TOKENS, answer.failure
    golden.compare(name, answer.tokens)
    assert answer.account is not None
    assert answer.account.computed == 0
    counter = "kv_transfer_bytes_total"
    assert after.value(counter) - before.value(counter) == (length - answer.account.cached) * TOKEN_BYTES
    for node in ("p", "d"):
        await all_blocks_are_back(nodes[node], BLOCKS)


async def test_several_chats_at_once_are_each_answered_as_transformers_would(
    nodes: dict[str, NodeProcess], keys: MasterKeys, golden: Golden
) -> None:
    names = [name for name, reference in golden.references.items() if reference["chat"]][:4]
    async with AsyncExitStack() as stack:
        pair = await pair_of(stack, keys, nodes)
        answers = {name: pair.submit(golden.prompt(name), greedy(MAX_TOKENS)) for name in names}
        for name, answer in answers.items():
            golden.compare(name, (await answer.end(60)).tokens)


async def test_f01_the_real_models_answer_survives_its_prefill_node(
    nodes: dict[str, NodeProcess], keys: MasterKeys, golden: Golden
) -> None:
    name, counter = golden.of_length(81), "kv_transfer_bytes_total"
    async with AsyncExitStack() as stack:
        pair = await pair_of(stack, keys, nodes)
        before = await pair.metrics("d")
        answer = pair.submit(golden.prompt(name), greedy(MAX_TOKENS), prefill=("hold",))

        async def landed() -> bool:
            sent = (await pair.metrics("hold")).value(counter)
            return sent > 0 and (await pair.metrics("d")).value(counter) - before.value(counter) == sent

        await answer.has_tokens(1)
        await eventually(landed, 1.5, "the parcels before the held one have landed")
        nodes["hold"].send(signal.SIGKILL)
        assert await nodes["hold"].exit_code(5) == -signal.SIGKILL
        await answer.end(60)
        after = await pair.metrics("d")
    golden.compare(name, answer.tokens)
    assert len(answer.tokens) == MAX_TOKENS, answer.failure
    assert answer.account is not None
    arrived = (after.value(counter) - before.value(counter)) // TOKEN_BYTES
    assert answer.account.cached + answer.account.transferred == (answer.account.cached + arrived) // 16 * 16
    assert 0 < answer.account.transferred < 81
    recomputed = after.value("kv_recomputed_tokens_total") - before.value("kv_recomputed_tokens_total")
    assert recomputed == answer.account.computed
    await all_blocks_are_back(nodes["d"], BLOCKS)
