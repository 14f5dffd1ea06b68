"""What prefill and decode nodes do when the other dies, hangs, lies or does not fit; faults are aimed at a parcel.

Over UCX's TCP lane, as between machines; `test_pd_transfer` takes the lane that UCX has within one.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from forked_decant import ForkedDecant
from pd_golden import TOY_LAYOUT, toy_answer, toy_prompt
from pd_nodes import (
    Metrics,
    NodeProcess,
    all_blocks_are_back,
    eventually,
    fresh_interpreter,
    start_node,
    transfer_ends,
    until_ready,
)
from pd_router_client import attached, greedy, new_request_id, prefill_choice
from pd_world import BLOCKS, SMALL, Pair

from engine.model.toy import write_toy_folder
from foundation.keys import MasterKeys, draw_master_keys, write_key_file
from kv_transfer.plan.parcels import cut_parcels

pytestmark = pytest.mark.sockets

POOL_LAYOUT = replace(TOY_LAYOUT, head_order="HND", layer_group=TOY_LAYOUT.layers)
SLOT_BYTES = 4096
LENGTH = 160
PARCELS = len(cut_parcels(0, LENGTH, POOL_LAYOUT, POOL_LAYOUT, SLOT_BYTES))
PARCEL_TOKENS = LENGTH // PARCELS
SILENCE_LIMIT_S = 5.0
"""Long enough that a node which is kept waiting for a moment is not given up: what has landed is counted to the byte."""
NAMES_OF_A_HANG = {"transfer_stalled", "silent", "prefill_stalled", "unresponsive"}
"""Data and control plane race to name it."""
GIVEN_UP_WITHIN_S = SILENCE_LIMIT_S + 10.0
"""On a machine that keeps processes waiting; a lease would be over after 30 s."""
HALF = PARCELS // 2
KILLED_AFTER = {"kill_first": 1, "kill_half": HALF, "kill_last": PARCELS - 1, "kill_then_next": HALF}
"""How many parcels have landed when the test kills the prefill node, which holds the ones after it."""
UNLIKE = ("--block-size=32", "--tensor-parallel-size=3", "--kv-head-order=NHD")
FAULTS = {name: f"hold_sends_from={sent}" for name, sent in KILLED_AFTER.items()} | {
    "stop": f"stop_before_send={HALF}",
    "hold": "hold_sends_from=3",
    "flip": "flip_byte_of_parcel=3",
    "d_killed": "kill_after_landed=3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pd_faults")
    write_toy_folder(folder / "toy")
    write_toy_folder(folder / "other", layers=5)
    return folder


@pytest.fixture(scope="module")
def keys(folder: Path) -> MasterKeys:
    keys = draw_master_keys()
    write_key_file(folder / "key", keys)
    return keys


class Cluster:
    """Nodes by name, started when first attached to. d, p: good ones; others are named after their fault."""

    def __init__(self, folder: Path, keys: MasterKeys) -> None:
        self._folder = folder
        self.keys = keys
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, name: str) -> NodeProcess:
        role = "decode" if name in ("d", "d_killed") else "prefill"
        model = self._folder / ("other" if name == "other" else "toy")
        options = (*SMALL, f"--silence-limit-s={SILENCE_LIMIT_S}", *(UNLIKE if name == "unlike" else ()))
        ports = self.nodes["kill_first"].ports if name == "restarted" else None
        faults, key_file = FAULTS.get(name, ""), self._folder / "key"
        # The one that drains is seen to end as a whole.
        start = fresh_interpreter if name == "unlike" else ForkedDecant
        self.nodes[name] = start_node(
            role, self._folder, model, key_file, *options, faults=faults, ports=ports, lanes="tcp", start=start
        )
        return self.nodes[name]

    @asynccontextmanager
    async def attached(self, *names: str) -> AsyncIterator[Pair]:
        """A router attached to these nodes and to d; afterwards d holds nothing."""
        await until_ready(*(self.nodes.get(name) or self.start(name) for name in ("d", *names)))
        async with AsyncExitStack() as stack:
            routers = {
                name: await stack.enter_async_context(attached(self.nodes[name].control_address))
                for name in ("d", *names)
            }
            yield Pair(self.keys, self.nodes, routers)
        await all_blocks_are_back(self.nodes["d"], BLOCKS)

    async def kill_when_landed(self, name: str, before: Metrics, parcels: int) -> None:
        """SIGKILL the prefill node `name` when so many parcels have landed on d since `before`."""
        counter = "kv_transfer_bytes_total"

        async def landed() -> bool:
            moved = (await self.nodes["d"].metrics()).value(counter) - before.value(counter)
            return moved >= parcels * PARCEL_TOKENS * TOY_LAYOUT.token_bytes

        await eventually(landed, 20, f"{parcels} parcels landed")
        self.nodes[name].send(signal.SIGKILL)
        assert await self.nodes[name].exit_code(60) == -signal.SIGKILL


@pytest.fixture(scope="module")
def cluster(folder: Path, keys: MasterKeys) -> Iterator[Cluster]:
    cluster = Cluster(folder, keys)
    yield cluster
    for node in cluster.nodes.values():
        node.end()


def connections(node: NodeProcess) -> set[tuple[int, int]]:
    """(local port, remote port) of every established TCP connection of the process."""
    sockets = set()
    for link in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            sockets.add(link.readlink().name)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = fields = line.split()
            if state == "01" and f"socket:[{fields[9]}]" in sockets:
                found.add((int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)))
    return found


async def failures(node: NodeProcess) -> dict[str, float]:
    return (await node.metrics()).nonzero("kv_transfer_failures_total")


@pytest.mark.parametrize("name", ["kill_first", "kill_half", "kill_last"])
async def test_f01_what_arrived_before_the_prefill_node_was_killed_is_kept_and_only_the_rest_recomputed(
    cluster: Cluster, name: str
) -> None:
    prompt = toy_prompt(LENGTH, seed=KILLED_AFTER[name])
    async with cluster.attached(name) as pair:
        d = cluster.nodes["d"]
        before = await d.metrics()
        answer = pair.submit(prompt, greedy(8), prefill=(name,))
        await cluster.kill_when_landed(name, before, KILLED_AFTER[name])
        await answer.end(20)
        after = await d.metrics()

    def grown(metric: str) -> float:
        return after.value(metric) - before.value(metric)

    assert answer.tokens == toy_answer(prompt, 8), answer.failure
    landed_tokens = grown("kv_transfer_bytes_total") / TOY_LAYOUT.token_bytes
    assert landed_tokens == KILLED_AFTER[name] * PARCEL_TOKENS
    assert answer.account is not None
    assert answer.account.transferred == landed_tokens // 16 * 16
    assert grown("kv_recomputed_tokens_total") == answer.account.computed == LENGTH - answer.account.transferred


async def test_f01_the_next_prefill_node_gives_the_rest_and_the_next_request_is_served(cluster: Cluster) -> None:
    prompt = toy_prompt(LENGTH, seed=50)
    async with cluster.attached("kill_then_next", "p") as pair:
        d = cluster.nodes["d"]
        before = await d.metrics()
        answer = pair.submit(prompt, greedy(8), prefill=("kill_then_next", "p"))
        await cluster.kill_when_landed("kill_then_next", before, HALF)
        await answer.end(20)
        assert answer.tokens == toy_answer(prompt, 8), answer.failure
        assert answer.account is not None
        assert (answer.account.transferred, answer.account.computed) == (LENGTH, 0)
        moved = (await d.metrics()).value("kv_transfer_bytes_total") - before.value("kv_transfer_bytes_total")
        kept = HALF * PARCEL_TOKENS // 16 * 16
        assert moved == (HALF * PARCEL_TOKENS + LENGTH - kept) * TOY_LAYOUT.token_bytes
        following = toy_prompt(50, seed=51)
        assert (await pair.submit(following, greedy(5)).end(20)).tokens == toy_answer(following, 5)


async def test_f02_a_prefill_node_that_hangs_is_given_up_for_lack_of_progress_and_its_late_parcels_change_nothing(
    cluster: Cluster,
) -> None:
    """F31 as well: log and metric say why."""
    prompt, request_id = toy_prompt(LENGTH, seed=60), new_request_id()
    async with cluster.attached("stop") as pair:
        d, stopped = cluster.nodes["d"], cluster.nodes["stop"]
        before = await failures(d)
        answer = pair.submit(prompt, greedy(8), prefill=("stop",), request_id=request_id)
        await answer.has_tokens(2)
        assert stopped.state() == "T"
        await answer.end(20)
        assert answer.tokens == toy_answer(prompt, 8)
        assert answer.arrivals_s[1] - answer.arrivals_s[0] < GIVEN_UP_WITHIN_S
        assert answer.account is not None
        # A process that stops keeps what it has not yet handed to the kernel; what has landed is counted in the tests of a kill.
        assert answer.account.transferred < LENGTH
        assert answer.account.transferred + answer.account.computed == LENGTH
        (reason,) = (why.partition(":")[0] for why in transfer_ends(d, request_id))
        assert reason in NAMES_OF_A_HANG
        assert await failures(d) == before | {reason: before.get(reason, 0) + 1}
        untouched = [toy_prompt(40, seed=61 + number) for number in range(4)]
        running = [pair.submit(one, greedy(60), prefill=()) for one in untouched]
        stopped.send(signal.SIGCONT)
        for one, other in zip(untouched, running, strict=True):
            assert (await other.end(20)).tokens == toy_answer(one, 60)
        await all_blocks_are_back(stopped, BLOCKS, within_s=5)
        await all_blocks_are_back(d, BLOCKS)


async def test_a_flipped_byte_is_noticed_counted_and_recomputed(cluster: Cluster) -> None:
    prompt = toy_prompt(LENGTH, seed=70)
    async with cluster.attached("flip") as pair:
        d = cluster.nodes["d"]
        before = await failures(d)
        answer = await pair.submit(prompt, greedy(8), prefill=("flip",)).end(20)
        after = await failures(d)
        assert answer.tokens == toy_answer(prompt, 8)
        assert after.get("bad_digest", 0) - before.get("bad_digest", 0) == 1
        assert answer.account is not None
        assert answer.account.transferred < LENGTH
        again = toy_prompt(LENGTH, seed=71)
        answer = await pair.submit(again, greedy(8), prefill=("flip",)).end(20)
        assert answer.tokens == toy_answer(again, 8)
        assert answer.account is not None
        assert answer.account.transferred == LENGTH
        await all_blocks_are_back(cluster.nodes["flip"], BLOCKS)


async def test_f10_a_client_that_leaves_while_its_kv_travels_frees_both_nodes(cluster: Cluster) -> None:
    async with cluster.attached("hold") as pair:
        hold = cluster.nodes["hold"]
        request_id, name = new_request_id(), "kv_transfer_bytes_total"
        before = (await hold.metrics()).value(name)
        answer = pair.submit(toy_prompt(LENGTH, seed=80), greedy(8), prefill=("hold",), request_id=request_id)

        async def three_parcels_left() -> bool:
            sent = (await hold.metrics()).value(name) - before
            return sent == 3 * PARCEL_TOKENS * TOY_LAYOUT.token_bytes

        await eventually(three_parcels_left, 20, "three parcels sent and the fourth held")
        pair.routers["d"].cancel(request_id)
        await answer.end(5)
        for name in ("d", "hold"):
            await all_blocks_are_back(cluster.nodes[name], BLOCKS, within_s=1)


async def test_f10_clients_that_leave_while_queued_and_while_travelling_free_both_nodes(cluster: Cluster) -> None:
    async with cluster.attached("hold") as pair:
        ids = [new_request_id(), new_request_id()]
        prompts = [toy_prompt(2400, seed=85 + number) for number in range(2)]
        travelling, queued = (
            pair.submit(prompt, greedy(8), prefill=("hold",), request_id=request_id)
            for prompt, request_id in zip(prompts, ids, strict=True)
        )

        async def one_waits() -> bool:
            return (await cluster.nodes["hold"].metrics()).value("requests_waiting") == 1

        await travelling.has_tokens(1)
        await eventually(one_waits, 20, "the second prompt waits for the first one's blocks")
        for request_id in reversed(ids):
            pair.routers["d"].cancel(request_id)
        for answer in (travelling, queued):
            await answer.end(5)
        assert queued.tokens == []
        for name in ("d", "hold"):
            await all_blocks_are_back(cluster.nodes[name], BLOCKS, within_s=1)


async def test_f16_a_prefill_node_of_other_weights_is_refused_by_name_and_both_stay_up(cluster: Cluster) -> None:
    prompt = toy_prompt(40, seed=90)
    async with cluster.attached("other", "p") as pair:
        d, other = cluster.nodes["d"], cluster.nodes["other"]
        answer = await pair.submit(prompt, greedy(6), prefill=("other", "p")).end(20)
        assert answer.tokens == toy_answer(prompt, 6)
        assert answer.account is not None
        assert answer.account.prefill_node == cluster.nodes["p"].name
        assert "weights" in d.log()
        assert [(await node.health())[0] for node in (d, other)] == [200, 200]


async def test_the_data_plane_is_a_connection_of_its_own(cluster: Cluster) -> None:
    prompt = toy_prompt(100, seed=95)
    async with cluster.attached("p") as pair:
        answer = await pair.submit(prompt, greedy(4)).end(20)
        assert answer.account is not None
        assert answer.account.transferred == 100
        d, p = cluster.nodes["d"], cluster.nodes["p"]

        async def each_has_its_own() -> bool:  # those of an earlier session may be closing
            between = [ends for ends in connections(d) if ends[::-1] in connections(p)]
            remote_ports = [remote for _, remote in between]
            once = all(remote_ports.count(port) == 1 for port in (p.ports.control, p.ports.data))
            return once and len(between) > 2

        await eventually(each_has_its_own, 10, "one connection for control, one for greeting, and at least one of UCX")
        assert '"lane": "tcp"' in d.log()


async def test_unlike_blocks_shards_and_head_orders_pair_and_give_the_same_tokens(cluster: Cluster) -> None:
    async with cluster.attached("unlike") as pair:
        for length in (5, 32, 50, 200):
            prompt = toy_prompt(length, seed=100 + length)
            answer = await pair.submit(prompt, greedy(6), prefill=("unlike",)).end(20)
            assert answer.tokens == toy_answer(prompt, 6), answer.failure
            assert answer.account is not None
            assert answer.account.transferred == length


async def test_f04_a_decode_node_killed_while_its_kv_arrives_leaves_nothing_on_the_prefill_node(
    cluster: Cluster,
) -> None:
    prompt = toy_prompt(LENGTH, seed=110)
    async with cluster.attached("d_killed", "p") as pair:
        before = await cluster.nodes["p"].metrics()
        pair.submit(prompt, greedy(8), decode="d_killed")
        assert await cluster.nodes["d_killed"].exit_code(60) == -signal.SIGKILL
        await all_blocks_are_back(cluster.nodes["p"], BLOCKS, within_s=SILENCE_LIMIT_S + 1)
        answer = await pair.submit(prompt, greedy(8)).end(20)
        assert answer.tokens == toy_answer(prompt, 8)
        found = (await cluster.nodes["p"].metrics()).value("prefix_cached_tokens_total")
        assert found - before.value("prefix_cached_tokens_total") > 0


async def test_f23_a_prefill_node_that_drains_ends_its_transfers_and_refuses_new_ones(cluster: Cluster) -> None:
    async with cluster.attached("unlike") as pair:
        drained = cluster.nodes["unlike"]
        prompts = [toy_prompt(300, seed=120 + number) for number in range(6)]
        answers = [pair.submit(prompt, greedy(8), prefill=("unlike",)) for prompt in prompts]
        await answers[0].has_tokens(1)
        drained.send(signal.SIGTERM)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert (await answer.end(20)).tokens == toy_answer(prompt, 8), answer.failure
        late = toy_prompt(40, seed=130)
        assert (await pair.submit(late, greedy(5), prefill=("unlike",)).end(20)).tokens == toy_answer(late, 5)
        assert await drained.exit_code(60) == 0


async def test_f22_a_prefill_node_restarted_under_its_address_is_used_again_and_its_old_tickets_are_not(
    cluster: Cluster,
) -> None:
    killed = cluster.nodes.get("kill_first") or cluster.start("kill_first")
    killed.send(signal.SIGKILL)  # unless a test before this one has done it
    assert await killed.exit_code(60) == -signal.SIGKILL
    async with cluster.attached("restarted") as pair:
        assert cluster.nodes["restarted"].name == cluster.nodes["kill_first"].name
        prompt = toy_prompt(60, seed=141)
        answer = await pair.submit(prompt, greedy(5), prefill=("restarted",)).end(20)
        assert answer.tokens == toy_answer(prompt, 5)
        assert answer.account is not None
        assert answer.account.transferred == 60
        stale, d, restarted = toy_prompt(60, seed=142), pair.routers["d"], pair.routers["restarted"]
        restarted.hello.entry.incarnation ^= 1
        old_ticket = prefill_choice(cluster.keys, d, restarted, "stale", stale)
        answer = await d.submit(stale, greedy(5), choices=[old_ticket], request_id="stale").end(20)
        assert answer.tokens == toy_answer(stale, 5)
        assert answer.account is not None
        assert answer.account.computed == 60
