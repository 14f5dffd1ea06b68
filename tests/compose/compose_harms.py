"""What accidents and operators do to a deployed project while streams of questions never stop.

Each proves that it took effect, ends with every node back at work, and lets no client see an error or a wrong token.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import replace

from chaos_load import Load, draw_questions
from chaos_models import ServedModel
from compose_deployed import DECODE, NODES, Deployed
from compose_load import all_is_well
from compose_project import SILENCE_LIMIT_S, WHOLE_LIMIT_S, condition, process_state, tell

FAULTS = "tests/compose/faults.yml"
MOST_KILLS = 3
UP = ("up", "--detach", "--no-build", "--no-deps")
RESTART = ("restart", "--timeout", "75")
"""Longer than a drain may take."""


async def prefill_killed_in_mid_transfer(deployed: Deployed, load: Load) -> None:
    failed_before = await transfers_failed(deployed)
    await asyncio.to_thread(deployed.compose, *UP, "prefill-0", also=[FAULTS])
    process, container = deployed.process("prefill-0"), deployed.container("prefill-0")

    async def stopped_in_mid_transfer() -> bool:
        return process_state(process) == "T"

    await condition(stopped_in_mid_transfer, WHOLE_LIMIT_S, lambda: f"a third parcel:\n{deployed.logs('prefill-0')}")
    await asyncio.to_thread(deployed.engine.docker, "kill", container)
    assert deployed.state("prefill-0")["ExitCode"] == 128 + signal.SIGKILL
    assert process_state(process) == ""

    async def noticed() -> bool:
        return await transfers_failed(deployed) > failed_before

    await condition(noticed, 30 + SILENCE_LIMIT_S, "a decode node counts the transfer that failed")
    await all_is_well(load)
    await asyncio.to_thread(deployed.compose, *UP, "prefill-0")
    await deployed.whole()
    await all_is_well(load)


async def transfers_failed(deployed: Deployed) -> float:
    metrics = [await deployed.metrics(decode) for decode in DECODE]
    return sum(sum(one.nonzero("kv_transfer_failures_total").values()) for one in metrics)


async def decode_killed_in_mid_stream(deployed: Deployed, load: Load) -> None:
    """Once more where its last stream ended just before the signal came."""
    moved_before = await streams_moved(deployed)
    for _ in range(MOST_KILLS):
        await decode_killed(deployed, load)
        if await streams_moved(deployed) > moved_before:
            return
    raise AssertionError(f"decode-0 was killed {MOST_KILLS} times, and no router moved a request")


async def decode_killed(deployed: Deployed, load: Load) -> None:
    async def streams() -> bool:
        return (await deployed.metrics("decode-0")).value("requests_running") >= 1

    await condition(streams, WHOLE_LIMIT_S, "decode-0 streams")
    container = deployed.container("decode-0")
    await asyncio.to_thread(deployed.engine.docker, "kill", container)
    assert deployed.state("decode-0")["ExitCode"] == 128 + signal.SIGKILL
    await condition(lambda: refused(deployed, "decode-0"), 30 + SILENCE_LIMIT_S, "the router refuses decode-0 work")
    await all_is_well(load)
    await asyncio.to_thread(deployed.engine.docker, "start", container)
    await deployed.whole()
    await all_is_well(load)


async def refused(deployed: Deployed, node: str) -> bool:
    return node not in await deployed.usable()


async def streams_moved(deployed: Deployed) -> float:
    return (await deployed.metrics("router")).value("request_attempts_total", reason="node_lost")


async def node_taken_off_the_network(deployed: Deployed, load: Load) -> None:
    container, network = deployed.container("decode-1"), f"{deployed.name}_inner"
    await asyncio.to_thread(deployed.engine.docker, "network", "disconnect", "--force", network, container)
    lost_after = await condition(
        lambda: refused(deployed, "decode-1"), 10 + SILENCE_LIMIT_S, "the router refuses decode-1 work"
    )
    assert deployed.engine.inspect(container)["NetworkSettings"]["Networks"] == {}
    assert deployed.state("decode-1")["Status"] == "running"
    await all_is_well(load)
    tell(f"a node without a network is refused work after {lost_after:.1f} s")
    restarts = deployed.engine.inspect(container)["RestartCount"]
    await asyncio.to_thread(deployed.engine.docker, "network", "connect", "--alias", "decode-1", network, container)

    async def begun_again() -> bool:
        """Its interface has another name now, and UCX keeps to the old one: it ends, and Docker starts it."""
        return bool(deployed.engine.inspect(container)["RestartCount"] > restarts)

    await condition(begun_again, WHOLE_LIMIT_S, lambda: f"decode-1 begins again:\n{deployed.logs('decode-1')}")
    assert "DataDevicesReplaced" in deployed.logs("decode-1", 2000)
    await deployed.whole()
    await deployed.receives_kv("decode-1")
    await all_is_well(load)


async def node_restarted(deployed: Deployed, load: Load, node: str) -> None:
    before, drains_before = deployed.state(node)["StartedAt"], drains(deployed, node)
    begun = time.monotonic()
    await asyncio.to_thread(deployed.compose, *RESTART, node)
    stopped_s = time.monotonic() - begun
    assert deployed.state(node)["StartedAt"] != before
    assert drains(deployed, node) == drains_before + 1, f"{node} did not drain:\n{deployed.logs(node)}"
    ready_s = await deployed.whole()
    tell(f"{node} drained and restarted in {stopped_s:.0f} s, given work after {ready_s:.0f} s more")
    await all_is_well(load)


def drains(deployed: Deployed, node: str) -> int:
    """Over all lives of its container."""
    return sum('"event": "drained"' in line for line in deployed.logs(node, 100_000).splitlines())


async def redis_restarted(deployed: Deployed, load: Load) -> None:
    await asyncio.to_thread(deployed.compose, "restart", "redis")
    await deployed.whole()
    await all_is_well(load)


async def second_router_restarted_with_streams(
    deployed: Deployed, load: Load, model: ServedModel, answer_tokens: int
) -> None:
    """Its own streams, long enough to be met by the restart, end first."""
    questions = [replace(one, max_tokens=answer_tokens) for one in draw_questions(model, 3, random.Random(1))]
    async with deployed.channel("router-1") as channel:
        asked = Load(model, channel, questions, 1)
        await asked.learn()
        answers = [asyncio.create_task(asked.checked(index)) for index in range(asked.questions)]

        async def streams() -> bool:
            return (await deployed.metrics("router-1")).value("requests_running") >= 1

        await condition(streams, WHOLE_LIMIT_S, "router-1 streams")
        assert not all(answer.done() for answer in answers), "nothing is under way that a restart could break"
        before = deployed.state("router-1")["StartedAt"]
        restart = asyncio.create_task(asyncio.to_thread(deployed.compose, *RESTART, "router-1"))
        await asyncio.gather(*answers)
        assert asked.verdict.wrong == []
    await restart
    assert deployed.state("router-1")["StartedAt"] != before
    await deployed.whole()
    await all_is_well(load)


async def at_rest(deployed: Deployed) -> None:
    """Waits until no node holds anything; nobody asks any more."""
    left: list[str] = []

    async def nothing_held() -> bool:
        left.clear()
        for node in sorted(NODES):
            metrics = await deployed.metrics(node)
            slots = {state for state in metrics.nonzero("staging_slots") if state != "free"}
            held = metrics.blocks()["in_use"] + metrics.value("requests_running") + metrics.value("requests_waiting")
            if slots or held:
                left.append(f"{node}: {held} held, slots {slots}")
        return not left

    await condition(nothing_held, 40 + 2 * SILENCE_LIMIT_S, lambda: f"nothing is held; {left}")
