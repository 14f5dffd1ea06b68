"""A router before real node processes with the toy model, whose next token is a hash of the KV bytes that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from forked_decant import ForkedDecant
from pd_golden import TOY_LAYOUT, toy_prompt
from pd_nodes import inherited
from router_under_test import RouterUnderTest, router_with, until

from bench.ports import free_port
from engine.model.toy import TOY_VOCABULARY_SIZE, write_toy_folder
from engine.model.toy_kv import toy_logits
from foundation.ids import NodeId
from foundation.keys import write_key_file
from router.generation import SamplingWishes, mint_request_id

pytestmark = [pytest.mark.sockets, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

NAMES = ("prefill-0", "decode-0", "decode-1")
DRAINED = "decode-0"
"""Has time to drain; the grace of the others is over at once."""
NODE_LOST = 'decant_request_attempts_total{reason="node_lost"}'
NODE_DRAINING = 'decant_request_attempts_total{reason="node_draining"}'

START_LIMIT_S = 90.0
STREAMS = 6
ANSWER_TOKENS = 200
TOKENS_BEFORE_THE_HARM = 10
TRIES = 5
"""Where the machine keeps this process waiting, an answer may be over before it could be harmed, and is asked for again."""
FREE_LIMIT_S = 10.0
"""On a busy machine; what each stage may take is measured in the tests of the nodes."""
CHOICES_PROMPT = "the prompt of several choices, whose last block is not full " * 3
TOY_TOKEN_BYTES = 4 * 6 * 2 * 4 * 4
"""KV of one token of the toy model: layers, heads, K and V, width, bytes."""


@dataclass
class NodeProcess:
    """One node that may be killed and started again under its own address."""

    arguments: list[str]
    log: Path
    http_port: int
    process: ForkedDecant | None = None

    async def start(self) -> None:
        self.process = await asyncio.to_thread(ForkedDecant, self.arguments, inherited(), self.log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 30)

    async def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            await self.ended()


@dataclass
class Cluster:
    router: RouterUnderTest
    nodes: dict[str, NodeProcess]
    unharmed: list[str] = field(default_factory=list)
    """`answers()` before any harm."""
    alone: list[str] = field(default_factory=list)
    """`choices_alone()`, once it was asked for."""

    async def all_usable(self) -> None:
        await until(lambda: _usable(self.router) == len(self.nodes), START_LIMIT_S)

    async def start_again(self, name: str) -> None:
        await self.nodes[name].start()
        await self.all_usable()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and two decode nodes."""
    folder_of_all = tmp_path_factory.mktemp("cluster")
    folder, key_file = write_toy_folder(folder_of_all / "toy"), folder_of_all / "keys"
    async with router_with(folder, wait_ready=False, silence_limit_s=2.0, heartbeat_s=0.5) as router:
        write_key_file(key_file, router.keys)
        nodes = {
            name: _node(name, folder, key_file, router.grpc_address, folder_of_all / f"{name}.log") for name in NAMES
        }
        try:
            await asyncio.gather(*(node.start() for node in nodes.values()))
            found = Cluster(router, nodes)
            await found.all_usable()
            found.unharmed = await answers(router)
            yield found
        finally:
            await asyncio.gather(*(node.close() for node in nodes.values()))


def _usable(router: RouterUnderTest) -> int:
    links = [router.router.fleet.link(NodeId(name)) for name in NAMES]
    return sum(link is not None and link.usable for link in links)


def _node(name: str, folder: Path, key_file: Path, registry: str, log: Path) -> NodeProcess:
    ports = {f"--{kind}-port": free_port() for kind in ("control", "data", "http")}
    return NodeProcess(_arguments(name, folder, key_file, registry, ports), log, ports["--http-port"])


def _arguments(name: str, folder: Path, key_file: Path, registry: str, ports: dict[str, int]) -> list[str]:
    settings: dict[str, object] = dict(ports)
    settings |= {"--model": folder, "--node-id": name, "--registry": registry}
    settings |= {"--kv-cache-memory-bytes": "64MiB", "--staging-bytes": "8MiB", "--slot-bytes": "64KiB"}
    settings |= {"--drain-grace-s": 60 if name == DRAINED else 0.2}
    role = name.split("-")[0]
    if role == "prefill":
        settings["--key-file"] = key_file
    return [role, *(f"{option}={value}" for option, value in settings.items())]


async def answer(router: RouterUnderTest, index: int) -> str:
    """One streamed answer, greedy for even indices and seeded for odd ones."""
    asked: Any = {"temperature": 0} if index % 2 == 0 else {"temperature": 1, "seed": index}
    stream = await router.openai().completions.create(
        model=router.model,
        prompt=f"{index}: " + "a prompt that fills a few blocks; " * 4,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **asked,
    )
    texts, tokens = [], 0
    async for chunk in stream:
        if chunk.choices:
            texts.append(chunk.choices[0].text)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    assert tokens == ANSWER_TOKENS
    return "".join(texts)


async def answers(router: RouterUnderTest) -> list[str]:
    return await asyncio.gather(*(answer(router, index) for index in range(STREAMS)))


Ask = Callable[[], Awaitable[Any]]


async def caught(cluster: Cluster, ask: Ask, requests: int) -> asyncio.Future[Any]:
    """What `ask()` will be answered, once each of its requests is under way and has shown some tokens."""
    ongoing = cluster.router.router.dispatcher._ongoing
    for _ in range(TRIES):
        asking = asyncio.ensure_future(ask())
        while not asking.done():
            shown = [len(one.journey.log) for one in ongoing.values()]
            if len(shown) == requests and min(shown) >= TOKENS_BEFORE_THE_HARM:
                return asking
            await asyncio.sleep(0.001)
        await asking
    raise AssertionError("every answer was over before it could be harmed")


async def interrupted(
    cluster: Cluster, victim: str, harm: Callable[[], Awaitable[None]], heal: Callable[[], Awaitable[None]]
) -> None:
    """Answers are under way, some of them on the victim, when it is harmed, and equal the unharmed ones. It stays harmed."""
    router = cluster.router
    for _ in range(TRIES):
        moved_before = await attempts_moved(router)
        running = await caught(cluster, lambda: answers(router), STREAMS)
        link = router.router.fleet.link(NodeId(victim))
        assert link is not None
        cut_off = len(link.attempts)
        if not cut_off:  # its neighbour was given all of them
            assert await running == cluster.unharmed
            continue
        await harm()
        assert await running == cluster.unharmed
        moved = await attempts_moved(router) - moved_before
        assert moved <= cut_off
        if moved:
            return
        await heal()
    raise AssertionError("no stream was struck by the harm")


async def attempts_moved(router: RouterUnderTest) -> float:
    return await router.metric(NODE_LOST) + await router.metric(NODE_DRAINING)


async def killed_under(cluster: Cluster, ask: Ask, requests: int, expected: Any) -> None:
    """The decode node that serves all of `ask()` is killed in its middle, and is there again afterwards."""
    for _ in range(TRIES):
        lost_before = await cluster.router.metric(NODE_LOST)
        asking = await caught(cluster, ask, requests)
        (victim,) = {str(one.journey.node) for one in cluster.router.router.dispatcher._ongoing.values()}
        cluster.nodes[victim].signal(signal.SIGKILL)
        assert await cluster.nodes[victim].ended() == -signal.SIGKILL
        assert await asking == expected
        lost = await cluster.router.metric(NODE_LOST) - lost_before
        assert lost <= requests
        await cluster.start_again(victim)
        if lost:
            return
    raise AssertionError("every answer was over before the kill struck it")


CHOICES = 5


async def choices_of_one_prompt(router: RouterUnderTest) -> list[str]:
    """All of one request, as a stream."""
    stream = await router.openai().completions.create(
        model=router.model,
        prompt=CHOICES_PROMPT,
        n=CHOICES,
        max_tokens=ANSWER_TOKENS,
        temperature=1,
        seed=77,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    texts = [""] * CHOICES
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


async def choices_alone(cluster: Cluster) -> list[str]:
    """Each as a request of its own, at the same seed and choice index."""
    if cluster.alone:
        return cluster.alone
    router = cluster.router
    intake = router.router.intake
    wishes = SamplingWishes(seed=77, temperature=1.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    (plain,) = intake.generations([await intake.prompt_from_text("prompt", CHOICES_PROMPT)], wishes)
    texts = []
    for choice in range(CHOICES):
        one = replace(plain, request_id=mint_request_id(), choice_index=choice)
        stream = router.router.dispatcher.open(one)
        text = ""
        while True:
            piece = await stream.next()
            text += piece.text
            if piece.last:
                break
        assert piece.failure is None
        texts.append(text)
    cluster.alone = texts
    return texts


async def carried_bytes(cluster: Cluster) -> float:
    """KV that the decode nodes have received."""
    total = 0.0
    for name in ("decode-0", "decode-1"):
        async with cluster.router.http.get(f"http://127.0.0.1:{cluster.nodes[name].http_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith("decant_kv_transfer_bytes_total"))
    return total


async def test_choices_of_one_prompt_equal_single_requests_and_their_prompt_travels_once(cluster: Cluster) -> None:
    before = await carried_bytes(cluster)
    together = await choices_of_one_prompt(cluster.router)
    assert await carried_bytes(cluster) - before == len(CHOICES_PROMPT) * TOY_TOKEN_BYTES
    assert len(set(together)) == CHOICES
    assert together == await choices_alone(cluster)


async def test_the_log_probabilities_of_a_prompt_are_the_models_own_and_nothing_travels(cluster: Cluster) -> None:
    prompt, before = toy_prompt(90, 3), await carried_bytes(cluster)
    body = {"prompt": [prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    status, found = await cluster.router.post("/v1/completions", body)
    assert status == 200, found
    logits = np.stack([toy_logits(prompt[:end], TOY_LAYOUT, TOY_VOCABULARY_SIZE) for end in range(1, len(prompt))])
    likely = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for choice in found["choices"]:
        nothing, *told = choice["logprobs"]["token_logprobs"]
        assert nothing is None
        assert told[:-1] == pytest.approx(likely[range(len(prompt) - 1), prompt[1:]].tolist(), abs=1e-4)
        best = [max(tops.values()) for tops in choice["logprobs"]["top_logprobs"][1:-1]]
        assert best == pytest.approx(likely.max(axis=1).tolist(), abs=1e-4)
    assert await carried_bytes(cluster) == before


async def test_f05_choices_of_one_prompt_go_on_elsewhere_each_at_its_own_token(cluster: Cluster) -> None:
    alone = await choices_alone(cluster)
    await killed_under(cluster, lambda: choices_of_one_prompt(cluster.router), CHOICES, alone)


async def test_f05_a_json_object_whose_decode_node_is_killed_in_its_middle_becomes_whole(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 5, "maxItems": 9}
        },
        "required": ["words"],
        "additionalProperties": False,
    }
    fields: Any = {"max_tokens": 600, "temperature": 1, "seed": 3, "structured_outputs": {"json": schema}}

    async def text() -> str:
        status, found = await cluster.router.post("/v1/completions", {"prompt": "an object:", **fields})
        assert status == 200, found
        assert found["choices"][0]["finish_reason"] == "stop"
        return str(found["choices"][0]["text"])

    unharmed = await text()
    assert 5 <= len(json.loads(unharmed)["words"]) <= 9
    await killed_under(cluster, text, 1, unharmed)


async def test_f10_http_clients_that_leave_at_any_moment_free_everything_on_every_node(cluster: Cluster) -> None:
    """While queued, prefilled, transferred and decoded: they leave a few milliseconds apart."""
    router = cluster.router

    async def leaves_after(seconds: float, number: int) -> None:
        body = {
            "prompt": f"{number} " + "x" * 1500,
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
            "n": 1 + number % 3,
        }
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                router.http.post(f"{router.url}/v1/completions", json=body) as response,
            ):
                await response.read()

    await asyncio.gather(*(leaves_after(0.02 * (number + 1), number) for number in range(24)))
    await until(lambda: router.router.dispatcher.in_flight == 0)

    async def held() -> dict[str, float]:
        found: dict[str, float] = {}
        for name, node in cluster.nodes.items():
            async with router.http.get(f"http://127.0.0.1:{node.http_port}/metrics") as response:
                lines = (await response.text()).splitlines()
            for start in ('decant_kv_blocks{state="in_use"}', "decant_requests_running", "decant_requests_waiting"):
                found |= {
                    f"{name} {line.split()[0]}": float(line.split()[-1]) for line in lines if line.startswith(start)
                }
        return {what: count for what, count in found.items() if count}

    async with asyncio.timeout(FREE_LIMIT_S):
        while left := await held():
            await asyncio.sleep(0.02)
    assert not left


async def test_f36_a_decode_node_that_is_stopped_and_goes_on_later_changes_no_token(cluster: Cluster) -> None:
    node = cluster.nodes["decode-0"]

    async def stop() -> None:
        node.signal(signal.SIGSTOP)

    async def go_on() -> None:
        node.signal(signal.SIGCONT)
        await cluster.all_usable()

    try:
        await interrupted(cluster, "decode-0", stop, go_on)
    finally:
        await go_on()
    assert await answers(cluster.router)


async def test_f23_the_streams_of_a_draining_decode_node_move_at_once_and_it_leaves(cluster: Cluster) -> None:
    node = cluster.nodes[DRAINED]
    lost_before = await cluster.router.metric(NODE_LOST)

    async def drain() -> None:
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0

    await interrupted(cluster, DRAINED, drain, lambda: cluster.start_again(DRAINED))
    assert await cluster.router.metric(NODE_LOST) == lost_before, "no stream was cut"
    await cluster.start_again(DRAINED)


async def test_f23_a_decode_node_whose_grace_ends_in_mid_stream_changes_no_token(cluster: Cluster) -> None:
    node = cluster.nodes["decode-1"]

    async def terminate() -> None:
        node.signal(signal.SIGTERM)

    async def start_again() -> None:
        await node.ended()
        await cluster.start_again("decode-1")

    await interrupted(cluster, "decode-1", terminate, start_again)
    await start_again()


async def test_f05_sigkill_of_a_decode_node_in_mid_stream_changes_no_token(cluster: Cluster) -> None:
    node = cluster.nodes["decode-1"]

    async def kill() -> None:
        node.signal(signal.SIGKILL)
        assert await node.ended() == -signal.SIGKILL

    await interrupted(cluster, "decode-1", kill, lambda: cluster.start_again("decode-1"))
    assert await answers(cluster.router)
