"""One seed: a cluster is drawn, its load and its faults, and then it lives until all is answered and everything is at rest.

    simulate(seed) -> Outcome

Everything random comes from the seed, and every callback runs in one thread on a virtual clock, so a seed replays exactly
(with PYTHONHASHSEED fixed, since sets of names are walked in the order of their hashes).

Must not know: how seeds are chosen.
"""

from __future__ import annotations

import random
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import grpc
import structlog
from cluster_books import Books
from cluster_clients import Clients, draw_wishes
from cluster_clock import PROCESS, Process, VirtualLoop
from cluster_faults import ROUTER, Fault, Harm, draw_faults
from cluster_lanes import SimulatedLanes
from cluster_nodes import Life, Machine, World, engine_config
from cluster_wires import SimulatedChannel, Wires

from foundation.ids import NodeId
from foundation.keys import KEY_BYTES, MasterKeys
from foundation.kv_layout import KvLayout
from foundation.registry_entry import Role
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import TransferLimits
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.memory_network import FENCED, READS
from router.clients import LinkTiming
from router.fleet import Fleet
from router.placement import Disaggregate
from router.registry import EmbeddedRegistry

PREFILL_NODES = tuple(NodeId(f"p{number}") for number in range(2))
DECODE_NODES = tuple(NodeId(f"d{number}") for number in range(3))
SILENCE_S, HEARTBEAT_S, LEASE_S, IDLE_S = 2.0, 0.5, 6.0, 5.0
SETTLING_S = 0.5
"""The cluster is up before the load begins."""
LOAD_S = 8.0
FAULTS_OVER_WITHIN_S = 90.0
ANSWERED_WITHIN_S = 150.0
"""From the last fault: beyond every request's deadline."""
REST_WITHIN_S = 40.0
"""From the last answer: idle sessions, their closing, and whoever must be silent for that long first."""
EXPECTED_ERRORS = frozenset({"parcel refused"})
"""What nodes may log as an error: an injected fault."""


@dataclass(frozen=True)
class Outcome:
    seed: int
    violations: tuple[str, ...]
    counts: Counter[str]
    virtual_s: float
    requests: int
    callbacks: int
    trace: tuple[tuple[float, str, Any], ...]
    plan: str


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"cluster/{seed}")
        self.loop = VirtualLoop(self._broke)  # type: ignore[abstract]
        self.books = Books(self.loop)
        self.lives: dict[str, Life] = {}
        self.wires = Wires(self.loop, f"wires/{seed}")
        self.keys = MasterKeys(((1, self.rng.randbytes(KEY_BYTES)),))
        rng = self.rng
        lane = FENCED if rng.random() < 0.7 else READS
        self.lanes = SimulatedLanes(self.wires, lane, random.Random(f"lanes/{seed}"), self.books.check_landing)
        self.wires.healed = self.lanes.wake
        longest = rng.choice((12, 40, 60))
        self.machines = [self._machine(name, Role.PREFILL, longest) for name in PREFILL_NODES]
        self.machines += [self._machine(name, Role.DECODE, longest) for name in DECODE_NODES]
        self.faults = draw_faults(rng, PREFILL_NODES, DECODE_NODES, LOAD_S)
        self.wishes = draw_wishes(rng, rng.randint(4, 16), LOAD_S, longest, [fault.at_s for fault in self.faults])

    def _machine(self, name: NodeId, role: Role, longest: int) -> Machine:
        """Nodes of unlike layouts pair; pools are often scarce: one long request and little more."""
        rng = self.rng
        block_size = rng.choice((2, 4, 8))
        layout = KvLayout(
            layers=2,
            kv_heads=2,
            head_dim=2,
            dtype="float32",
            block_size=block_size,
            head_order=rng.choice(("NHD", "HND")),
            layer_group=rng.choice((1, 2)),
            tensor_parallel=rng.choice((1, 2)),
        )
        positions = rng.choice((1, 2, 6)) * (longest + 24 + block_size)
        slot_bytes = rng.choice((256, 1024))
        slow = rng.random() < 0.3
        return Machine(
            name=name,
            role=role,
            layout=layout,
            config=engine_config(rng, block_size, positions, role is Role.DECODE),
            limits=TransferLimits(
                staging_bytes=slot_bytes * rng.choice((8, 16, 32)),
                slot_bytes=slot_bytes,
                silence_limit_s=SILENCE_S,
                heartbeat_s=HEARTBEAT_S,
                lease_s=LEASE_S,
                lease_renewal_s=LEASE_S / 3,
                idle_limit_s=IDLE_S,
            ),
            step_s=(0.005, 0.15) if slow else (0.002, 0.02),
            copy_s=(0.0001, 0.004),
        )

    def _broke(self, process: str, what: str, error: BaseException | None) -> None:
        self.books.violated(f"{process}: {what}: {type(error).__name__}: {error}")

    def start(self) -> None:
        registry_now: Callable[[], float] = lambda: self.loop.now_s  # noqa: E731
        router = Process(ROUTER)
        registry = router.context.copy().run(EmbeddedRegistry, registry_now)
        self.world = World(self.loop, self.wires, self.lanes, self.books, self.keys, registry)
        for machine in self.machines:
            self._restart(machine.name)
        timing = LinkTiming(SILENCE_S, HEARTBEAT_S)
        disaggregate = Disaggregate.AUTO if self.rng.random() < 0.15 else Disaggregate.ALWAYS
        fleet = Fleet(registry, ROUTER, self.keys, timing, self.loop.time, disaggregate=disaggregate)
        self.clients = Clients(router, fleet, self.books, self.machines[0].layout, self.machines[0].config)
        self.loop.run(self.loop.now_s + SETTLING_S)
        router.context.copy().run(self.clients.start, self.wishes)
        self.loop.run(self.loop.now_s + SETTLING_S)
        self.harm = Harm(self.loop, self.wires, self.lives, self.books, self._restart)
        self.books.parcel = self.harm.parcel
        self.harm.schedule(self.faults)

    def _restart(self, name: str) -> None:
        machine = next(machine for machine in self.machines if machine.name == name)
        self.lives[name] = Life(machine, self.world, random.Random(self.rng.getrandbits(64)))

    def live(self) -> None:
        loop, books = self.loop, self.books
        faults_over = loop.run(loop.now_s + FAULTS_OVER_WITHIN_S, lambda: self.harm.open == 0)
        books.require(faults_over, "a fault is never over")
        answered = loop.run(loop.now_s + ANSWERED_WITHIN_S, lambda: self.clients.unfinished == 0)
        if not answered:
            waiting = self.clients.dispatcher.accounts(waiting=True)
            books.violated(f"{self.clients.unfinished} requests never end; {waiting}")
        if not loop.run(loop.now_s + REST_WITHIN_S, lambda: not books.unrest(), look_every=256):
            books.violated(f"I7: no rest: {'; '.join(books.unrest()[:8])}")
        books.check_rest()
        in_flight = self.clients.dispatcher.in_flight
        books.require(in_flight == 0, f"{in_flight} requests are in the router's table at rest")
        for task in loop.failed_tasks():
            books.violated(f"a task failed: {task.get_name()}: {task.exception()!r}")


def simulate(seed: int) -> Outcome:
    cluster = Cluster(seed)
    began_s = cluster.loop.now_s
    books = cluster.books
    with _world_replaced(cluster), cluster.loop.running():
        try:
            cluster.start()
            cluster.live()
        except Exception:
            books.violated(f"the simulation itself failed: {traceback.format_exc()}")
    return Outcome(
        seed=seed,
        violations=tuple(books.violations),
        counts=books.counts,
        virtual_s=cluster.loop.now_s - began_s,
        requests=len(cluster.wishes),
        callbacks=cluster.loop.callbacks_run,
        trace=tuple(books.trace),
        plan=_plan(cluster),
    )


def _plan(cluster: Cluster) -> str:
    machines = [
        f"  {m.name}: {m.layout.head_order} block {m.layout.block_size} group {m.layout.layer_group} "
        f"tp {m.layout.tensor_parallel}, {m.config.num_blocks} blocks, {m.config.max_num_seqs} seats, "
        f"{m.config.max_num_batched_tokens} tokens a step, overlap {m.config.overlap}, slots of {m.limits.slot_bytes}"
        for m in cluster.machines
    ]
    faults = [f"  {fault}" for fault in cluster.faults]
    return "\n".join([f"lane {cluster.lanes.lane.name}, {len(cluster.wishes)} requests", *machines, *faults])


@contextmanager
def _world_replaced(cluster: Cluster) -> Iterator[None]:
    """What nodes and router take from their surroundings: gRPC channels, random numbers, time, logs; and the books look on."""
    books, draws = cluster.books, random.Random(cluster.rng.getrandbits(64))

    def channel(address: str, options: object = None) -> SimulatedChannel:
        return SimulatedChannel(cluster.wires, address)

    def log(logger: object, level: str, event: MutableMapping[str, Any]) -> str:
        process = PROCESS.get()
        who = process.name if process else "nobody"
        if level in ("error", "critical") and event.get("event") not in EXPECTED_ERRORS:
            books.violated(f"{who} logs: {event}")
        elif level != "debug":
            books.note(who, event)
        raise structlog.DropEvent

    structlog.configure(processors=[log], cache_logger_on_first_use=False)
    with ExitStack() as stack:
        stack.enter_context(patch.object(grpc.aio, "insecure_channel", channel))
        stack.enter_context(patch.object(secrets, "randbits", draws.getrandbits))
        stack.enter_context(patch.object(time, "perf_counter", lambda: cluster.loop.now_s))
        stack.enter_context(_looked_at(DecodeDriver, books.decode_turn))
        stack.enter_context(_looked_at(PrefillDriver, books.prefill_turn))
        yield


def _looked_at(driver: Any, look: Callable[[Any, Any, Any], None]) -> Any:
    """The driver's turns, each looked at as soon as its effects are known."""
    handle = driver._handle

    @wraps(handle)
    def looked_at(self: Any, event: Any) -> Any:
        effects = handle(self, event)
        look(self, event, effects)
        return effects

    return patch.object(driver, "_handle", looked_at)


__all__ = ["Cluster", "Fault", "Outcome", "simulate"]
