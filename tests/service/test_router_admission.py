"""Who is let in and where prompts are computed: the router with fake nodes that say how fast and how busy they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from router_fake_node import FakeNode
from router_model_folder import write_model_folder
from router_under_test import RouterUnderTest, router_with, until

from foundation.ids import NodeId
from foundation.registry_entry import Role

pytestmark = pytest.mark.sockets

SPEED = 10_000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("router") / "tiny-model")


def pair(**decode: Any) -> tuple[FakeNode, FakeNode]:
    prefill = FakeNode("p0", Role.PREFILL, prompt_tokens_per_second=SPEED)
    return FakeNode("d0", prompt_tokens_per_second=SPEED, lanes={"p0": 1e9}, **decode), prefill


def body(prompt: str = "hello", max_tokens: int = 2) -> dict[str, Any]:
    return {"model": "tiny-model", "prompt": prompt, "max_tokens": max_tokens}


async def placements(router: RouterUnderTest, reason: str) -> float:
    return await router.metric(f'decant_placements_total{{reason="{reason}"}}')


async def status_heard(router: RouterUnderTest, node: FakeNode) -> None:
    """The router has the node's present queue."""

    def heard() -> bool:
        link = router.router.fleet.link(NodeId(node.node_id))
        status = link.health.status if link is not None else None
        return status is not None and status.queued_tokens == node.queued_tokens

    node.tell_status()
    await until(heard)


async def test_auto_computes_where_it_is_faster_and_says_so(folder: Path) -> None:
    decode, prefill = pair()
    async with router_with(folder, decode, prefill, disaggregate="auto") as router:
        await router.post("/v1/completions", body())
        decode.queued_tokens = 50_000
        await status_heard(router, decode)
        await router.post("/v1/completions", body())
        idle, busy = decode.submits
        assert (len(idle.prefill_choices), idle.local_reason) == (0, "decode_is_faster")
        assert ([choice.node_id for choice in busy.prefill_choices], busy.local_reason) == (["p0"], "")
        assert await placements(router, "decode_is_faster") == 1
        assert await placements(router, "prefill_is_faster") == 1
        assert await router.metric("decant_predicted_time_to_first_token_seconds_count") == 2
        assert await router.metric("decant_prediction_ratio_count") == 2


async def test_a_slow_link_stays_local_however_busy_the_decode_node_is(folder: Path) -> None:
    decode, prefill = pair(queued_tokens=2_000)
    decode.lanes = {"p0": 1000.0}
    async with router_with(folder, decode, prefill, disaggregate="auto") as router:
        await status_heard(router, decode)
        await router.post("/v1/completions", body())
    assert decode.submits[0].local_reason == "decode_is_faster"


async def test_always_and_never_ask_no_prediction(folder: Path) -> None:
    for how, choices, label in (("always", 1, "always"), ("never", 0, "disaggregation_off")):
        decode, prefill = pair()
        async with router_with(folder, decode, prefill, disaggregate=how) as router:
            await router.post("/v1/completions", body())
            assert await placements(router, label) == 1
        assert len(decode.submits[0].prefill_choices) == choices


async def test_f13_a_request_that_cannot_make_its_deadline_costs_no_node_anything(folder: Path) -> None:
    decode, prefill = pair(queued_tokens=1_000_000)
    decode.prompt_tokens_per_second = prefill.prompt_tokens_per_second = 100.0
    prefill.queued_tokens = 1_000_000
    async with router_with(folder, decode, prefill, request_timeout_s=5.0) as router:
        await status_heard(router, decode)
        await status_heard(router, prefill)
        status, found = await router.post("/v1/completions", body())
        assert status == 503
        assert found["error"]["code"] == "deadline_unmeetable"
        assert found["error"]["retryable"] is True
        assert decode.submits == []
        assert await router.metric('decant_requests_refused_total{reason="deadline_unmeetable"}') == 1
        decode.queued_tokens = prefill.queued_tokens = 0
        await status_heard(router, decode)
        await status_heard(router, prefill)
        assert (await router.post("/v1/completions", body()))[0] == 200


async def test_f13_prompts_that_wait_are_bounded_in_tokens(folder: Path) -> None:
    decode = FakeNode("d0", tokens_until_pause=0)
    async with router_with(folder, decode, max_waiting_tokens=100) as router:
        first = asyncio.create_task(router.post("/v1/completions", body("x" * 150)))
        await until(lambda: len(decode.submits) == 1)  # longer than the bound, but nobody else waits
        status, found = await router.post("/v1/completions", body("x"))
        assert (status, found["error"]["code"], found["error"]["retryable"]) == (503, "overloaded", True)
        decode.tokens_until_pause = None
        assert (await first)[0] == 200
        assert (await router.post("/v1/completions", body("x" * 90)))[0] == 200


async def test_who_waits_is_told_with_the_prediction(folder: Path) -> None:
    decode, prefill = pair(tokens_until_pause=0)
    async with router_with(folder, decode, prefill) as router:
        waiting = asyncio.create_task(router.post("/v1/completions", body()))
        await until(lambda: len(decode.submits) == 1)
        _, text = await router.get("/waiting")
        (one,) = json.loads(text)["waiting"]
        assert (one["waits_on"], one["computed_on"], one["placed_because"]) == ("d0", "p0", "always")
        assert one["expected_s"] > 0
        decode.tokens_until_pause = None
        assert (await waiting)[0] == 200
