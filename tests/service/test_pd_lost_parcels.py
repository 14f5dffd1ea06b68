"""F21: each parcel of a transfer is lost once, also while a second request that shares the prompt's beginning travels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from pd_golden import TOY_LAYOUT, toy_answer, toy_prompt
from pd_nodes import all_blocks_are_back, start_node, until_ready
from pd_router_client import attached, greedy
from pd_world import BLOCKS, PATIENT, SMALL, Pair

from engine.model.toy import write_toy_folder
from foundation.keys import draw_master_keys, write_key_file
from kv_transfer.plan.parcels import cut_parcels

pytestmark = pytest.mark.sockets

SHARED, LENGTH = 48, 80
POOL_LAYOUT = replace(TOY_LAYOUT, head_order="HND", layer_group=TOY_LAYOUT.layers)
PARCELS = len(cut_parcels(0, LENGTH, POOL_LAYOUT, POOL_LAYOUT, 4096))


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """A prefill node that flips a byte of one parcel after the other, and a decode node that caches nothing."""
    model, keys = write_toy_folder(tmp_path / "toy"), draw_master_keys()
    write_key_file(tmp_path / "key", keys)
    common = (*SMALL, PATIENT)
    flips = start_node("prefill", tmp_path, model, tmp_path / "key", *common, faults="flip_next_parcel_from=0")
    forgets = start_node("decode", tmp_path, model, tmp_path / "key", *common, "--no-enable-prefix-caching")
    try:
        await until_ready(flips, forgets)
        async with attached(flips.control_address) as p, attached(forgets.control_address) as d:
            yield Pair(keys, {"p": flips, "d": forgets}, {"p": p, "d": d})
        for node in (flips, forgets):
            await all_blocks_are_back(node, BLOCKS)
    finally:
        flips.end()
        forgets.end()


async def test_f21_whichever_parcel_is_lost_the_text_is_right_and_only_its_request_recomputes(pair: Pair) -> None:
    lost = 0
    for number in range(PARCELS):
        beginning = toy_prompt(SHARED, seed=number)
        prompts = [beginning + toy_prompt(LENGTH - SHARED, seed=1000 + 2 * number + one) for one in range(2)]
        before = await harmed(pair)
        answers = [pair.submit(prompt, greedy(6)) for prompt in prompts]
        await asyncio.gather(*(answer.end(20) for answer in answers))
        flipped = await harmed(pair) - before
        lost += flipped
        recomputed = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == toy_answer(prompt, 6), answer.failure
            assert answer.account is not None
            assert answer.account.transferred + answer.account.computed == LENGTH
            recomputed += answer.account.computed > 0
        assert recomputed == flipped
        if lost == PARCELS:
            return
    raise AssertionError(f"only the first {lost} of {PARCELS} parcels were lost")


async def harmed(pair: Pair) -> int:
    """Parcels that the decode node has refused."""
    found = (await pair.metrics("d")).nonzero("kv_transfer_failures_total")
    assert set(found) <= {"bad_digest"}
    return round(found.get("bad_digest", 0))
