"""Prefill nodes that die, lie or are gone, while the real model answers through a router: the client's stream goes on, its tokens
are transformers', what was proven is kept and only the rest is computed again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from deployment import SILENCE_LIMIT_S, TOKEN_BYTES, WHOLE_BLOCKS_A_PARCEL, Deployment, NodeKind, Spent, holding
from pd_nodes import eventually
from references import ONLY_WITH_ALL, Reference, all_references, near_tie_or_none

from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import cut_parcels

pytestmark = [pytest.mark.sockets, pytest.mark.model, pytest.mark.timeout(240), ONLY_WITH_ALL]

PROMPT = next(one for one in all_references() if len(one.prompt_ids) == 300)
FOLLOWING = next(one for one in all_references() if len(one.prompt_ids) == 33)
LENGTH = len(PROMPT.prompt_ids)
BLOCK = 32
"""Of the decode node; one parcel holds one such block."""
PARCELS = -(-LENGTH // BLOCK)


def check_tokens(reference: Reference, tokens: list[int]) -> None:
    near_tie = near_tie_or_none(tokens, reference)
    print(f"{reference.name}: near-tie at {near_tie}" if near_tie is not None else f"{reference.name}: equal")  # noqa: T201


@asynccontextmanager
async def nothing_stays_behind(deployment: Deployment) -> AsyncIterator[None]:
    """On the decode node: no block in use, no slot taken, when all has ended."""
    yield

    async def at_rest() -> bool:
        metrics = await deployment.metrics("d")
        slots = metrics.nonzero("staging_slots")
        return metrics.blocks()["in_use"] == 0 and set(slots) <= {"free"}

    await eventually(at_rest, SILENCE_LIMIT_S, "every block and slot of the decode node is free")


def test_a_parcel_is_one_block() -> None:
    source = KvLayout(30, 3, 64, "float32", 16, "HND", layer_group=30)
    target = KvLayout(30, 3, 64, "float32", BLOCK, "HND", layer_group=30)
    slot_bytes = int(WHOLE_BLOCKS_A_PARCEL.removeprefix("--slot-bytes=").removesuffix("MiB")) << 20
    parcels = cut_parcels(0, LENGTH, source, target, slot_bytes)
    assert [parcel.positions for parcel in parcels] == [BLOCK] * (PARCELS - 1) + [LENGTH % BLOCK]


@pytest.mark.parametrize("landed", [1, PARCELS // 2, PARCELS - 1])
async def test_f01_a_prefill_node_killed_in_mid_transfer_costs_the_client_nothing(
    deployment: Deployment, landed: int
) -> None:
    name, kept = f"p-holds-{landed}", landed * BLOCK
    router = await deployment.router_named("mortals", name, "d", **{name: holding(landed)})
    prefill = deployment.node(name)
    async with nothing_stays_behind(deployment), Spent(deployment, "d") as spent:
        answer = asyncio.create_task(router.generate(PROMPT.prompt_ids, max_tokens=32))
        before = spent.before("d", "kv_transfer_bytes_total")

        async def have_landed() -> bool:
            now = (await deployment.metrics("d")).value("kv_transfer_bytes_total")
            return now - before == landed * BLOCK * TOKEN_BYTES

        async def no_more_was_sent() -> bool:
            sent = (await prefill.metrics()).value("kv_transfer_bytes_total")
            assert sent <= landed * BLOCK * TOKEN_BYTES
            return sent == landed * BLOCK * TOKEN_BYTES  # P may notice later than D

        await eventually(have_landed, 60, f"{landed} parcels have landed")
        await eventually(no_more_was_sent, SILENCE_LIMIT_S, f"{landed} parcels were sent")
        prefill.send(signal.SIGKILL)
        assert await prefill.exit_code(60) == -signal.SIGKILL
        tokens = (await answer).tokens
    check_tokens(PROMPT, tokens)
    assert spent.moved("d") == kept * TOKEN_BYTES
    assert spent.grown("d", "kv_recomputed_tokens_total") == LENGTH - kept
    assert spent.stepped("d") == LENGTH - kept + len(tokens) - 1
    assert sum(spent.failures("d").values()) == 1
    async with Spent(deployment, "d") as spent:
        check_tokens(FOLLOWING, (await router.generate(FOLLOWING.prompt_ids, max_tokens=32)).tokens)
    assert sum(spent.local_prefills("d").values()) == 1


async def test_a_byte_that_changes_on_its_way_is_noticed_counted_and_computed_again(deployment: Deployment) -> None:
    router = await deployment.router("p-flips", "d")
    async with nothing_stays_behind(deployment), Spent(deployment, "d") as spent:
        answer = await router.generate(PROMPT.prompt_ids, max_tokens=32)
    check_tokens(PROMPT, answer.tokens)
    assert spent.failures("d") == {"bad_digest": 1}
    assert "parcel refused" in deployment.node("d").log()
    recomputed = spent.grown("d", "kv_recomputed_tokens_total")
    assert recomputed == LENGTH - 3 * BLOCK
    assert spent.stepped("d") == recomputed + len(answer.tokens) - 1
    async with Spent(deployment, "d") as spent:
        answer = await router.generate(PROMPT.prompt_ids, max_tokens=32)
    check_tokens(PROMPT, answer.tokens)
    assert spent.moved("d") == LENGTH * TOKEN_BYTES
    assert spent.failures("d") == {}


async def test_f27_without_a_prefill_node_the_decode_node_serves_alone_until_one_is_back(
    deployment: Deployment,
) -> None:
    router = await deployment.router_named("f27", "p-mortal", "d", **{"p-mortal": NodeKind("prefill", 16)})
    references = [one for one in all_references() if 60 < len(one.prompt_ids) <= 300][:8]
    prefill = deployment.node("p-mortal")
    async with nothing_stays_behind(deployment):
        answers = [asyncio.create_task(router.generate(one.prompt_ids, max_tokens=32)) for one in references]

        async def some_have_travelled() -> bool:
            return (await prefill.metrics()).value("kv_transfer_bytes_total") > 0

        await eventually(some_have_travelled, 60, "the prefill node sends KV")
        assert not all(answer.done() for answer in answers)
        prefill.send(signal.SIGKILL)
        assert await prefill.exit_code(60) == -signal.SIGKILL
        for reference, answer in zip(references, answers, strict=True):
            check_tokens(reference, (await answer).tokens)

    async def is_known_to_be_gone() -> bool:
        return prefill.name not in await asyncio.to_thread(router.usable)

    await eventually(is_known_to_be_gone, SILENCE_LIMIT_S, "the router has noticed")
    async with Spent(deployment, "d") as spent:
        check_tokens(FOLLOWING, (await router.generate(FOLLOWING.prompt_ids, max_tokens=32)).tokens)
    assert spent.moved("d") == 0
    assert spent.local_prefills("d") == {"prefill_not_ready": 1}
    await deployment.router_named("f27", "p")
    async with Spent(deployment, "d") as spent:
        check_tokens(FOLLOWING, (await router.generate(FOLLOWING.prompt_ids, max_tokens=32)).tokens)
    assert spent.moved("d") == len(FOLLOWING.prompt_ids) * TOKEN_BYTES
    assert spent.local_prefills("d") == {}
