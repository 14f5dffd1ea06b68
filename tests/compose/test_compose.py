"""`docker compose up` on an engine without images, and what operators and accidents do to it while clients ask without a pause.

The tests share one project and run in order: ready, asked, harmed, rolled over, taken down. From `load` on, streams of questions
never stop; each harm proves that it took effect, and no client may see an error or a token other than the unharmed one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from chaos_load import Load, draw_questions
from chaos_models import ServedModel, served_model
from compose_deployed import DECODE, NODES, PREFILL, SEEN, Deployed
from compose_engine import Engine
from compose_harms import (
    at_rest,
    decode_killed_in_mid_stream,
    node_restarted,
    node_taken_off_the_network,
    prefill_killed_in_mid_transfer,
    redis_restarted,
    second_router_restarted_with_streams,
)
from compose_images import NODE, ROUTER, Built
from compose_load import all_is_well
from compose_project import (
    SILENCE_LIMIT_S,
    TIMES_ARE_TOLD,
    WHOLE_LIMIT_S,
    body_of,
    condition,
    processors,
    tell,
)
from compose_prometheus import build_image, panels
from decant_proto.v1 import inference_pb2, inference_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from references import all_references, near_tie_or_none

pytestmark = [
    pytest.mark.docker,
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

READY_LIMIT_S = 90.0
ROUTER_READY_LIMIT_S = 3.0
ROUTER_IMAGE_LIMIT_BYTES = 200 * 10**6
REGISTRY_LEASE_S = 6.0
QUESTIONS, STREAMS = 12, 4
OBSERVABILITY = "deploy/compose/observability.yml"
ONLY_IN_TROUBLE = {
    "KV transfer: Failures, by reason",
    "Fallbacks and placement: Prompts computed by decode nodes, by reason",
    "Trouble: Not ready, for how long",
    "Trouble: Changed nothing, by reason",
}
"""Panels that show nothing while all is well."""


@pytest.fixture(scope="module")
def deployed(engine: Engine, built: Built, model: ServedModel) -> Iterator[Deployed]:
    project = Deployed(engine, model)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """DECANT_COMPOSE_MODEL=random: a small model, for trying things out on a busy machine."""
    return served_model(os.environ.get("DECANT_COMPOSE_MODEL", "real"), tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(deployed: Deployed, model: ServedModel) -> AsyncIterator[Load]:
    """Questions through the first router that never stop; their unharmed answers are known."""
    async with deployed.channel("router") as channel:
        asked = Load(model, channel, draw_questions(model, QUESTIONS, random.Random(7)), 7)
        await asked.learn()
        asked.start(STREAMS)
        yield asked
        await asked.stop()


def judged(line: str, seconds: float, limit_s: float) -> None:
    tell(f"{line} (limit {limit_s:.0f} s)")
    assert seconds < limit_s or TIMES_ARE_TOLD


async def test_images_are_built_and_a_routers_is_small(engine: Engine, built: Built) -> None:
    sizes = {name: engine.image_bytes(name) for name in (ROUTER, NODE)}
    told = ", ".join(f"{name} {size / 10**6:.0f} MB" for name, size in sizes.items())
    tell(f"{told}; built in {built.base_s:.0f} (bases) + {built.router_s:.0f} + {built.node_s:.0f} s")
    assert sizes[ROUTER] < ROUTER_IMAGE_LIMIT_BYTES
    packages = engine.docker("run", "--rm", "--entrypoint", "ls", ROUTER, "/opt/venv/lib/python3.11/site-packages")
    assert not {"torch", "libucx", "numpy", "transformers"} & set(packages.split())


async def test_everything_is_ready_within_90_s_on_an_engine_that_has_only_the_images(deployed: Deployed) -> None:
    begun = time.monotonic()
    deployed.compose("up", "--detach", "--no-build")
    await deployed.whole()
    seconds = time.monotonic() - begun
    judged(f"ready {seconds:.0f} s after `up`, the model's conversion included", seconds, READY_LIMIT_S)


async def test_a_router_that_is_started_again_is_ready_within_3_s(deployed: Deployed) -> None:
    container = deployed.container("router-1")
    await asyncio.to_thread(deployed.engine.docker, "stop", container)
    begun = time.monotonic()
    await asyncio.to_thread(deployed.engine.docker, "start", container)

    async def ready() -> bool:
        body = await asyncio.to_thread(body_of, f"{deployed.http['router-1']}/health")
        return bool(body) and json.loads(body)["status"] == "ready"

    await condition(ready, WHOLE_LIMIT_S, "router-1 is ready")
    seconds = time.monotonic() - begun
    await deployed.whole()
    judged(f"a router is ready {seconds:.1f} s after `docker start`", seconds, ROUTER_READY_LIMIT_S)


async def test_every_container_is_bounded_unprivileged_and_healthy(deployed: Deployed) -> None:
    for service in ("router", "router-1", *sorted(NODES), "redis"):
        facts = deployed.engine.inspect(deployed.container(service))
        host = facts["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["Init"], service
        assert host["CapDrop"] == ["ALL"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert host["Memory"] > 0, service
        assert 0 < host["NanoCpus"] / 1e9 <= processors(), service
        assert facts["Config"]["User"] not in ("", "root", "0"), service

        async def healthy(service: str = service) -> bool:
            return bool(deployed.state(service)["Health"]["Status"] == "healthy")

        await condition(healthy, WHOLE_LIMIT_S, f"{service} is healthy")


async def test_no_key_is_in_a_containers_description_its_command_line_or_its_log(deployed: Deployed) -> None:
    key = deployed.engine.docker("exec", deployed.container("router"), "cat", "/etc/decant/keys/master.key").split()[2]
    for service in ("router", *sorted(NODES), "keys"):
        container = deployed.container(service)
        assert key not in deployed.engine.docker("inspect", container)
        assert key not in deployed.logs(service, 100_000)
    for service in ("router", *sorted(NODES)):
        process = Path(f"/proc/{deployed.process(service)}")
        assert key.encode() not in process.joinpath("cmdline").read_bytes()
        assert key.encode() not in process.joinpath("environ").read_bytes()
    for image in (ROUTER, NODE):
        assert key not in deployed.engine.docker("history", "--no-trunc", image)
    for service in DECODE:
        mounts = deployed.engine.inspect(deployed.container(service))["Mounts"]
        assert not any(mount["Destination"].startswith("/etc/decant/keys") for mount in mounts)


def only_real(model: ServedModel) -> None:
    if model.kind != "real":
        pytest.skip("the references are the real model's")


async def test_it_answers_over_http(deployed: Deployed, model: ServedModel) -> None:
    only_real(model)
    reference = next(one for one in all_references() if one.name == "chat-08")
    client = openai.AsyncOpenAI(base_url=f"{deployed.http['router']}/v1", api_key="none")
    name = (await client.models.list()).data[0].id
    assert name == "SmolLM2-135M-Instruct"
    assert reference.text is not None
    asked = {"model": name, "temperature": 0.0, "max_tokens": 32}
    messages = [{"role": "user", "content": reference.text}]
    whole = await client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == reference.output_text
    parts = await client.chat.completions.create(messages=messages, stream=True, **asked)  # type: ignore[call-overload]
    text = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
    assert text == reference.output_text
    await client.close()


async def test_it_answers_over_grpc_with_the_references_tokens_and_says_that_it_is_well(
    deployed: Deployed, model: ServedModel
) -> None:
    only_real(model)
    for router in ("router", "router-1"):
        async with deployed.channel(router) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            for reference in [one for one in all_references() if one.name in ("plain-02", "exact-48-09")]:
                request = inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=reference.prompt_ids),
                    sampling=inference_pb2.SamplingOptions(temperature=0, max_tokens=32),
                )
                responses: AsyncIterable[inference_pb2.GenerateResponse] = stub.Generate(request, timeout=60)
                near_tie_or_none([token.token_id async for one in responses for token in one.tokens], reference)
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("liveness", "readiness"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_f26_every_pair_says_which_lane_it_took_and_how_fast_it_is(deployed: Deployed, load: Load) -> None:
    lanes: set[tuple[str, str]] = set()

    async def all_paired() -> bool:
        for decode in DECODE:
            body = await deployed.get(decode, "/metrics")
            for line in body.splitlines():
                if line.startswith("decant_kv_lane_gigabytes_per_second{"):
                    assert re.search(r'lane="tcp(/to_peer)?"', line), line
                    lanes.update((decode, prefill) for prefill in PREFILL if f'peer="{prefill}"' in line)
        return len(lanes) == len(PREFILL) * len(DECODE)

    await condition(all_paired, WHOLE_LIMIT_S, lambda: f"all pairs have met; so far {sorted(lanes)}")
    await all_is_well(load)


async def test_prometheus_finds_every_process_by_name_and_its_rules_evaluate(deployed: Deployed) -> None:
    begun = time.monotonic()
    await asyncio.to_thread(build_image, deployed.engine)
    await asyncio.to_thread(deployed.compose, "up", "--detach", "--no-deps", "prometheus", also=[OBSERVABILITY])
    await deployed.prometheus.scrapes(SEEN)
    rules = await deployed.prometheus.evaluated_rules()
    assert len(rules) > 20
    tell(
        f"Prometheus has scraped all and evaluated its rules {time.monotonic() - begun:.0f} s after its image was begun"
    )


async def test_f25_a_process_that_hangs_is_down_by_name(deployed: Deployed, load: Load) -> None:
    """The second router, so that no client of the first one waits."""
    container = deployed.container("router-1")
    await asyncio.to_thread(deployed.engine.docker, "pause", container)
    try:
        seconds = await deployed.prometheus.alerts_on(("DecantProcessDown", "router-1:8000"))
        down = await asyncio.to_thread(deployed.prometheus.query, 'up{job="decant-router"} == 0')
        assert [json.loads(labels)["instance"] for labels in down] == ["router-1:8000"]
    finally:
        await asyncio.to_thread(deployed.engine.docker, "unpause", container)
    tell(f"a process that hangs is down after {seconds:.0f} s")
    await deployed.prometheus.scrapes(SEEN)
    await deployed.whole()
    await all_is_well(load)


async def test_f01_a_prefill_node_killed_in_mid_transfer_costs_nobody_anything(deployed: Deployed, load: Load) -> None:
    await prefill_killed_in_mid_transfer(deployed, load)
    await deployed.prometheus.shows("KV transfer: Failures, by reason", of_the_last="10m")


async def test_f05_f22_a_decode_node_killed_in_mid_stream_moves_its_streams_and_comes_back(
    deployed: Deployed, load: Load
) -> None:
    await decode_killed_in_mid_stream(deployed, load)


async def test_a_node_taken_off_the_network_is_missed_by_nobody_and_comes_back_under_load(
    deployed: Deployed, load: Load
) -> None:
    await node_taken_off_the_network(deployed, load)


async def test_f27_without_prefill_nodes_decode_nodes_serve_alone_until_they_are_back(
    deployed: Deployed, load: Load
) -> None:
    before = await computed_locally(deployed)
    containers = [deployed.container(name) for name in PREFILL]
    await deployed.prometheus.knows_how_many_are_usual("decant-prefill")
    await asyncio.to_thread(deployed.engine.docker, "kill", *containers)

    async def alone() -> bool:
        return await computed_locally(deployed) > before

    await condition(alone, WHOLE_LIMIT_S, "a decode node computes prompts itself, and says so")
    await all_is_well(load)
    await deployed.prometheus.shows(
        "Fallbacks and placement: Prompts computed by decode nodes, by reason", of_the_last="10m"
    )
    routers = [("DecantNoPrefillNode", instance) for instance in ("router:8000", "router-1:8000")]
    more_s = await deployed.prometheus.alerts_on(("DecantProcessesMissing", ""), *routers)
    tell(f"an alert that no prefill node is left was pending {more_s:.0f} s after clients had noticed nothing")
    await asyncio.to_thread(deployed.engine.docker, "start", *containers)
    await deployed.whole()
    await deployed.receives_kv("decode-0")
    await all_is_well(load)


async def computed_locally(deployed: Deployed) -> float:
    metrics = [await deployed.metrics(decode) for decode in DECODE]
    return sum(sum(one.nonzero("local_prefill_total").values()) for one in metrics)


async def test_f16_a_node_with_other_weights_is_paired_with_nobody_and_harms_nobody(
    deployed: Deployed, load: Load
) -> None:
    name = "prefill-odd"  # which is how others find it, too
    overrides = {"DECANT_NODE_ID": name, "DECANT_ADVERTISE_ADDRESS": name, "DECANT_DTYPE": "bfloat16"}
    given = [part for item in overrides.items() for part in ("-e", "=".join(item))]
    await asyncio.to_thread(deployed.compose, "run", "--detach", "--no-deps", "--name", name, *given, "prefill-0")
    try:

        async def seen() -> bool:
            return name in await asyncio.to_thread(body_of, f"{deployed.http['router']}/health")

        await condition(seen, WHOLE_LIMIT_S, lambda: f"{name} is seen:\n{deployed.engine.docker('logs', name)}")
        await all_is_well(load)
        (network,) = deployed.engine.inspect(name)["NetworkSettings"]["Networks"].values()
        exposition = await asyncio.to_thread(body_of, f"http://{network['IPAddress']}:7102/metrics")
        assert "\ndecant_kv_transfer_bytes_total 0.0\n" in exposition
    finally:
        await asyncio.to_thread(deployed.engine.docker, "rm", "--force", name)
    await all_is_well(load)


async def test_f32_an_address_that_is_not_the_machines_ends_the_start_by_name(deployed: Deployed) -> None:
    done = await asyncio.to_thread(
        deployed.compose, "run", "--rm", "--no-deps", "-e", "DECANT_HOST=192.0.2.1", "decode-0", check=False
    )
    assert done.returncode == 2
    assert "--host: 192.0.2.1 is no address of this machine" in done.stdout + done.stderr


async def test_f23_every_node_is_restarted_in_turn_under_load(deployed: Deployed, load: Load) -> None:
    for node in (*PREFILL, *DECODE):
        await node_restarted(deployed, load, node)


async def test_f24_redis_is_gone_for_longer_than_its_leases_and_nodes_come_back_to_it(
    deployed: Deployed, load: Load
) -> None:
    lives = {node: deployed.state(node)["StartedAt"] for node in NODES}
    await asyncio.to_thread(deployed.compose, "stop", "redis")
    gone = time.monotonic()

    async def longer_than_a_lease() -> bool:
        return time.monotonic() - gone > REGISTRY_LEASE_S + SILENCE_LIMIT_S

    await condition(longer_than_a_lease, 30, "the outage itself")
    await all_is_well(load)
    assert await deployed.usable() == NODES
    await asyncio.to_thread(deployed.compose, "start", "redis")
    redis = deployed.container("redis")

    async def announced() -> bool:
        keys = deployed.engine.docker("exec", redis, "redis-cli", "--raw", "keys", "decant:node:*").split()
        return {key.rpartition(":")[2] for key in keys} == NODES

    await condition(announced, WHOLE_LIMIT_S, "every node has announced itself again")
    assert {node: deployed.state(node)["StartedAt"] for node in NODES} == lives
    await all_is_well(load)


async def test_redis_is_restarted_under_load(deployed: Deployed, load: Load) -> None:
    await redis_restarted(deployed, load)


async def test_one_of_two_routers_is_restarted_its_streams_end_first_and_the_others_notice_nothing(
    deployed: Deployed, load: Load, model: ServedModel
) -> None:
    await second_router_restarted_with_streams(deployed, load, model, answer_tokens=model.answer_tokens[1])


async def test_every_panel_and_rule_can_be_evaluated_and_panels_have_data_under_load(
    deployed: Deployed, load: Load
) -> None:
    begun = time.monotonic()
    await deployed.prometheus.evaluated_rules()
    all_panels = panels()
    for title in ONLY_IN_TROUBLE:
        for query in all_panels.pop(title):
            await asyncio.to_thread(deployed.prometheus.query, query)
    await deployed.prometheus.shows(*all_panels)
    tell(f"{len(all_panels)} panels had data within {time.monotonic() - begun:.0f} s")
    await all_is_well(load)


async def test_at_the_end_nothing_is_held_and_no_answer_was_wrong(deployed: Deployed, load: Load) -> None:
    await load.stop()
    verdict = load.verdict
    tell(
        f"{len(verdict.answers)} answers under harm, {len(verdict.errors)} errors, near-ties: {verdict.near_ties or 'none'}"
    )
    assert verdict.errors == []
    assert verdict.wrong == []
    await at_rest(deployed)


async def test_down_leaves_only_the_volumes_and_with_them_nothing(deployed: Deployed) -> None:
    deployed.compose("down", also=[OBSERVABILITY])
    docker = deployed.engine.docker
    assert docker("ps", "-aq") == ""
    assert set(docker("network", "ls", "--format", "{{.Name}}").split()) == {"bridge", "host", "none"}
    volumes = {f"decant_{name}" for name in ("keys", "models", "prometheus", "grafana")}
    assert set(docker("volume", "ls", "-q").split()) <= volumes
    deployed.compose("down", "--volumes", also=[OBSERVABILITY])
    assert docker("volume", "ls", "-q") == ""
