"""docker-compose.yml where no two wall clocks agree: the prefill node's is days ahead of the router's, the decode node's days
behind, and they jump while questions are asked.

Containers of one machine share its clock; libfaketime stands between a node and that clock. What a node's wall clock says is
read off the `Date` of its own HTTP answers. The tests share one project and run in order.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from chaos_load import Load, draw_questions
from chaos_models import served_model
from compose_engine import Engine
from compose_images import BUILD_LIMIT_S, NODE, Built
from compose_load import all_is_well
from compose_project import HTTP_PORTS, WHOLE_LIMIT_S, Project, body_of, condition, tell, usable
from references import all_references, near_tie_or_none

from bench.ports import free_ports
from decant.client import AsyncClient
from decant.default_model import cache_root, ensure_default_model

pytestmark = [
    pytest.mark.docker,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

IMAGE = "decant-tests/node-cpu-faketime:dev"
DOCKERFILE = f"""FROM {NODE}
USER root
RUN apt-get update && apt-get install -y --no-install-recommends libfaketime && rm -rf /var/lib/apt/lists/*
USER decant
"""
FILES = ("docker-compose.yml", "tests/compose/small.yml", "tests/compose/clocks.yml")
PREFILL, DECODE = "prefill-0", "decode-0"
NODES = {PREFILL, DECODE}
APART = {PREFILL: 3, DECODE: -5}
CROSSED = {PREFILL: -5, DECODE: 3}
RIGHT = {PREFILL: 0, DECODE: 0}
"""Days ahead of the machine's clock."""
DAY_S = 86_400
SILENCE_LIMIT_S = 15.0
"""Long enough that a busy machine reaches it never, and short beside days."""
CLOCK_TOLERANCE_S = 600.0
REFERENCES = ("plain-02", "exact-48-09")
QUESTIONS, STREAMS = 6, 2


class Clocked(Project):
    """A router, whose clock is the machine's, a prefill node and a decode node. `folder`: what their clocks read."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._folder = folder
        http, grpc_port = free_ports(2)
        self.http, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc_port}"
        environment = {"HTTP_PORT": str(http), "GRPC_PORT": str(grpc_port), "CLOCKS": str(folder)}
        environment |= {"MODELS": str(cache_root()), "DTYPE": "float32", "KV_CACHE_MEMORY": "192MiB"}
        environment |= {"SILENCE_LIMIT": str(SILENCE_LIMIT_S)}
        super().__init__(engine, "decant", FILES, environment)

    def set_clocks(self, days: dict[str, int]) -> None:
        for node, ahead in days.items():
            written = self._folder / f"{node}.new"
            written.write_text(f"{ahead:+d}d\n")
            written.rename(self._folder / node)  # whole at every moment

    async def clocks_are(self, days: dict[str, int]) -> None:
        """Waits until both nodes' own clocks say so."""
        ahead_s: dict[str, float] = {}

        async def set_so() -> bool:
            for node in days:
                ahead_s[node] = await asyncio.to_thread(self._ahead_s, node)
            return all(abs(ahead_s[node] - ahead * DAY_S) < CLOCK_TOLERANCE_S for node, ahead in days.items())

        await condition(set_so, WHOLE_LIMIT_S, lambda: f"clocks are ahead by {days} days; they are by {ahead_s} s")

    def _ahead_s(self, node: str) -> float:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            f"http://{self.address(node)}:{HTTP_PORTS[node.partition('-')[0]]}/live", timeout=10
        ) as answer:
            return parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()

    async def usable(self) -> set[str]:
        return usable(await asyncio.to_thread(body_of, f"{self.http}/health"))

    async def whole(self) -> None:
        async def both() -> bool:
            return await self.usable() == NODES

        await condition(both, WHOLE_LIMIT_S, lambda: f"the router gives work to both nodes\n{self.story()}")

    def story(self) -> str:
        return "\n".join(f"--- {one}\n{self.logs(one, 15)}" for one in ("router", *sorted(NODES)))

    async def computed_locally(self) -> float:
        return sum((await self.metrics(DECODE)).nonzero("local_prefill_total").values())

    async def nothing_expired(self) -> None:
        """No ticket was refused, no transfer failed, no node was lost, and both live their first life."""
        prefill, decode = await self.metrics(PREFILL), await self.metrics(DECODE)
        dropped = prefill.nonzero("dropped_total")
        assert [reason for reason in dropped if reason.startswith("ticket_")] == [], dropped
        for node in (prefill, decode):
            assert node.nonzero("kv_transfer_failures_total") == {}, self.story()
        attempts = await self.metrics("router")
        assert attempts.value("request_attempts_total", reason="node_lost") == 0, self.story()
        for name in NODES:
            assert self.engine.inspect(self.container(name))["RestartCount"] == 0, self.logs(name)


@pytest.fixture(scope="module")
def clocked(engine: Engine, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clocked]:
    ensure_default_model()
    with tempfile.TemporaryDirectory() as context:
        (Path(context) / "Dockerfile").write_text(DOCKERFILE)
        engine.docker("build", "--quiet", "--tag", IMAGE, context, limit_s=BUILD_LIMIT_S)
    folder = tmp_path_factory.mktemp("clocks")
    folder.chmod(0o755)  # so that the containers' user may look into it
    project = Clocked(engine, folder)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(clocked: Clocked, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Load]:
    """Questions that never stop, asked for the first time while clocks are apart."""
    model = served_model("real", tmp_path_factory.mktemp("model"))
    async with grpc.aio.insecure_channel(clocked.grpc, options=(("grpc.enable_http_proxy", 0),)) as channel:
        asked = Load(model, channel, draw_questions(model, QUESTIONS, random.Random(29)), 29)
        await asked.learn()
        asked.start(STREAMS)
        yield asked
        await asked.stop()


async def test_f29_nodes_whose_clocks_are_days_apart_are_ready_and_kv_travels_with_exact_answers(
    clocked: Clocked,
) -> None:
    begun = time.monotonic()
    clocked.set_clocks(APART)
    await asyncio.to_thread(clocked.compose, "up", "--detach", "--no-build", "redis", "router", *sorted(NODES))
    await clocked.whole()
    await clocked.clocks_are(APART)
    tell(f"nodes whose clocks are {APART} days ahead are ready {time.monotonic() - begun:.0f} s after `up`")
    async with AsyncClient(clocked.grpc) as client:

        async def kv_travels_with_an_answer() -> bool:
            for reference in [one for one in all_references() if one.name in REFERENCES]:
                answer = await client.complete(reference.prompt_ids, max_tokens=32, temperature=0.0)
                near_tie_or_none(answer.token_ids, reference)
            sent, received = [
                (await clocked.metrics(one)).value("kv_transfer_bytes_total") for one in (PREFILL, DECODE)
            ]
            return sent > 0 and received > 0

        await condition(kv_travels_with_an_answer, WHOLE_LIMIT_S, lambda: f"KV travels\n{clocked.story()}")
    await clocked.nothing_expired()


@pytest.mark.parametrize("days", [CROSSED, RIGHT], ids=["crossed", "put right"])
async def test_f29_clocks_that_jump_by_days_under_load_change_nothing(
    clocked: Clocked, load: Load, days: dict[str, int]
) -> None:
    await clocked.receives_kv(DECODE)
    locally, begun = await clocked.computed_locally(), time.time()
    clocked.set_clocks(days)
    await clocked.clocks_are(days)
    await clocked.receives_kv(DECODE)
    await all_is_well(load)
    await clocked.nothing_expired()
    assert await clocked.computed_locally() == locally, f"prompts did not travel\n{clocked.story()}"
    assert await clocked.usable() == NODES
    gap_s = max(answer.longest_gap_s for answer in load.verdict.answers if answer.ended > begun)
    tell(f"clocks jumped to {days} days; the longest gap between two tokens was {gap_s:.1f} s")


async def test_f29_silence_is_noticed_by_a_node_whose_clock_has_gone_back(clocked: Clocked, load: Load) -> None:
    """What waits for a moment of the wall clock would now wait for days."""
    container = clocked.container(PREFILL)
    before = silences_noticed(clocked)
    await asyncio.to_thread(clocked.engine.docker, "pause", container)
    try:
        clocked.set_clocks(APART)
        await clocked.clocks_are({DECODE: APART[DECODE]})

        async def noticed() -> bool:
            return PREFILL not in await clocked.usable() and silences_noticed(clocked) > before

        seconds = await condition(noticed, WHOLE_LIMIT_S, lambda: f"a paused node is missed\n{clocked.story()}")
    finally:
        await asyncio.to_thread(clocked.engine.docker, "unpause", container)
    tell(f"a paused prefill node was missed {seconds:.1f} s after the clock of its decode node had gone back")
    await clocked.whole()
    await clocked.receives_kv(DECODE)
    await all_is_well(load)
    tell(f"{len(load.verdict.answers)} answers beside clocks that jump, no error")


def silences_noticed(clocked: Clocked) -> int:
    """By the decode node, of the prefill node: each of them ends a session."""
    lines = [json.loads(line) for line in clocked.logs(DECODE, 10_000).splitlines() if line.startswith("{")]
    return sum((line.get("peer"), line.get("reason")) == (PREFILL, "silent") for line in lines)
