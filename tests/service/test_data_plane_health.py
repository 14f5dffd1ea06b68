"""F25 and F26 in real processes: decode nodes whose data plane is wedged or slow are named, spared, and still serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from pd_golden import toy_answer, toy_prompt
from toy_cluster import ToyCluster, toy_cluster

pytestmark = [pytest.mark.sockets, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 6
MOST_REQUESTS = 24
NAMED = {"d0": "p0: transfer_stalled", "d1": "p0: lane_too_slow: "}
"""How the health of a decode node must begin to name what is wrong with it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToyCluster]:
    """`d0` never notices that a parcel has landed; `d1` wants a lane faster than there is; `d2` is well."""
    async with toy_cluster(
        tmp_path_factory.mktemp("data-plane"),
        {"p0": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"},
        faults={"d0": "hold_landed_from=0"},
        own_options={"d1": ["--min-lane-gigabytes-per-second=100000"]},
    ) as cluster:
        yield cluster


async def health(cluster: ToyCluster, name: str) -> tuple[int, Any]:
    status, body = await asyncio.to_thread(cluster.nodes[name].get, "/health")
    return status, json.loads(body)


async def test_f25_f26_what_is_wrong_is_named_and_work_goes_where_kv_arrives(cluster: ToyCluster) -> None:
    blamed: dict[str, Any] = {}
    for number in range(MOST_REQUESTS):
        prompt = toy_prompt(40, number)
        answer = await cluster.complete(prompt, TOKENS)
        assert answer["choices"][0]["token_ids"] == toy_answer(prompt, TOKENS), "whoever served it"
        for name in ("d0", "d1"):
            status, body = await health(cluster, name)
            if status == 503 and body["reasons"][0]["detail"].startswith(NAMED[name]):
                blamed[name] = body
        if blamed.keys() == NAMED.keys() and (await cluster.nodes["d2"].metrics()).value("kv_transfer_bytes_total"):
            break
    else:
        raise AssertionError(f"{MOST_REQUESTS} requests; named: {blamed}; or none went where KV arrives")

    (wedged,) = blamed["d0"]["reasons"]
    assert (wedged["reason"], wedged["detail"]) == ("data_plane", NAMED["d0"])
    assert wedged["since_s"] >= 0
    assert blamed["d0"]["parts"]["data_plane"]["broken"] == {"p0": "transfer_stalled"}
    (slow,) = blamed["d1"]["reasons"]
    assert slow["reason"] == "data_plane"
    assert (await health(cluster, "d2"))[0] == 200
    for name in ("d0", "d1", "d2"):
        assert await asyncio.to_thread(cluster.nodes[name].get, "/live") == (200, '{"status": "live"}')
    assert (await health(cluster, "d2"))[1]["parts"]["data_plane"]["lanes"]["p0"]["lane"] == "tcp"


async def test_f27_where_no_kv_arrives_at_all_decode_nodes_serve_alone(cluster: ToyCluster) -> None:
    """No sound decode node is left: those that are not ready serve all the same."""
    cluster.nodes["d2"].process.kill()
    prompt = toy_prompt(40, 99)
    answers = await asyncio.gather(*(cluster.complete(prompt, TOKENS) for _ in range(4)))
    for answer in answers:
        assert answer["choices"][0]["token_ids"] == toy_answer(prompt, TOKENS)
