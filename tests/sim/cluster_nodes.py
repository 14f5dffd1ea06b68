"""The nodes of a simulated cluster: services, drivers, protocol, scheduler and pool as they are, on simulated machines.

What is put in the place of the world: gRPC streams (`cluster_wires`), the data plane (`cluster_lanes`), the copier thread
(`cluster_effects`), the engine thread and the model (`cluster_engine`).

Must not know: what is done to a node, and what is asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from cluster_books import Books
from cluster_clock import Process, VirtualLoop
from cluster_effects import Effects, SimulatedCopier
from cluster_engine import END_OF_TEXT, VOCABULARY_SIZE, SimulatedEngine, ToyRunner
from cluster_lanes import SimulatedLanes
from cluster_wires import SimulatedServer, Wires
from decant_proto.v1 import node_pb2, node_pb2_grpc

from decode_node.service import DecodeService
from engine.config import EngineConfig
from engine.kv_cache.storage import KvStorage
from engine.loop import Engine
from engine.port import EngineEvent
from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, NodeId, TransferId
from foundation.keys import MasterKeys
from foundation.kv_layout import KvLayout
from foundation.metrics import NodeMetrics
from foundation.registry_entry import ANNOUNCE_EVERY_S, LEASE_S, NodeEntry, Role
from kv_transfer import decode_driver, prefill_driver
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import EngineProgress, MeteredTransfers, NodeIdentity, ParcelStage, TransferLimits
from kv_transfer.faults import Faults
from kv_transfer.pool_copy import KvPool
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.wire import write_fingerprint
from node.engine_feed import EngineFeed
from node.router_stream import RouterStreams
from node.wire import entry_to_wire
from prefill_node.service import PrefillService
from router.registry import EmbeddedRegistry

FINGERPRINT = Fingerprint("toy", "toy", "toy", VOCABULARY_SIZE, "float32", "", "", 1)
STEP_LIMIT_S = 0.3
LONGEST_CLOCK_OFFSET_S = 1e6
METRICS = NodeMetrics()
"""Of all nodes together: nothing here looks at them."""


@dataclass(frozen=True)
class Machine:
    """What stays of a node from one life to the next."""

    name: NodeId
    role: Role
    layout: KvLayout
    config: EngineConfig
    limits: TransferLimits
    step_s: tuple[float, float]
    copy_s: tuple[float, float]

    @property
    def address(self) -> str:
        return f"{self.name}:1"


@dataclass
class World:
    """What all machines share."""

    loop: VirtualLoop
    wires: Wires
    lanes: SimulatedLanes
    books: Books
    keys: MasterKeys
    registry: EmbeddedRegistry


class Life:
    """One life of a node, from its start until it is killed."""

    def __init__(self, machine: Machine, world: World, rng: random.Random) -> None:
        self.machine = machine
        self.world = world
        self.incarnation = Incarnation(rng.getrandbits(64) | 1)
        self.process = Process(machine.name, rng.uniform(-1, 1) * LONGEST_CLOCK_OFFSET_S)
        self.effects = Effects()
        self.faults = Faults()
        self.driver: Any = None
        self.service: Any = None
        self.observer = WatchedTransfers(self)
        self._rng = rng
        world.books.lives[self.process] = self
        self.process.context.copy().run(self._start)

    def __repr__(self) -> str:
        return self.machine.name

    @property
    def decodes(self) -> bool:
        return self.machine.role is Role.DECODE

    def _start(self) -> None:
        machine, loop = self.machine, self.world.loop
        self.storage = KvStorage(machine.layout, machine.config.num_blocks)
        engine = Engine(machine.config, ToyRunner(self.storage), self.storage.owner_words)
        self.engine = SimulatedEngine(engine, lambda: self._rng.uniform(*machine.step_s))
        self.transport = self.world.lanes.of_process(self.process, self.effects)
        loop.create_task(self._serve(), name=f"serve {machine.name}")

    async def _serve(self) -> None:
        machine = self.machine
        server = SimulatedServer(self.world.wires, self.process)
        if self.decodes:
            self._build_decode()
        else:
            await self._build_prefill(server)
        feed = EngineFeed(self.engine.status, METRICS)

        def status() -> node_pb2.NodeStatus:
            epoch = 0 if self.decodes else self.driver.epoch
            return feed.node_status((), self.service.draining, epoch, self.observer.bytes_per_second)

        streams = self._streams = RouterStreams(self.service, self._hello(), status, machine.limits.heartbeat_s)

        def events_arrived(events: Sequence[EngineEvent]) -> None:
            feed.after_step()
            self.service.engine_events(events)
            if feed.load_changed():
                streams.status_changed()

        self.engine.start(events_arrived)
        node_pb2_grpc.add_NodeServicer_to_server(streams, server)  # type: ignore[arg-type]
        server.listen(machine.address)
        loop = self.world.loop
        loop.create_task(streams.push_status(), name="push status")
        loop.create_task(self._announce(), name="announce")

    def _build_decode(self) -> None:
        machine = self.machine
        self.service = DecodeService(self.engine.post, machine.config, VOCABULARY_SIZE, METRICS)
        with patch.object(decode_driver, "copier_of", self._copier):
            self.driver = DecodeDriver(
                self._identity(),
                self._pool(),
                machine.limits,
                self.transport,
                self.service,
                self._progress,
                self.observer,
                self.faults,
            )
        self.service.use(self.driver)

    async def _build_prefill(self, server: SimulatedServer) -> None:
        machine = self.machine
        self.service = PrefillService(self.engine.post, machine.config, VOCABULARY_SIZE, METRICS)
        data_address = await self.transport.listen(machine.name, 2)
        with patch.object(prefill_driver, "copier_of", self._copier):
            self.driver = PrefillDriver(
                self._identity(),
                self._pool(),
                machine.limits,
                self.transport,
                data_address,
                self.world.keys.for_node(machine.name),
                self.service,
                self._progress,
                self.observer,
                self.faults,
            )
        self.service.use(self.driver)
        self.driver.register(server)

    def _copier(self, pool: KvPool) -> SimulatedCopier:
        return SimulatedCopier(
            pool,
            self.world.loop,
            self.process,
            self.effects,
            lambda: self._rng.uniform(*self.machine.copy_s),
            partial(self.world.books.check_scatter, self),
        )

    def _identity(self) -> NodeIdentity:
        return NodeIdentity(self.machine.name, self.incarnation, FINGERPRINT, STEP_LIMIT_S)

    def _pool(self) -> KvPool:
        return KvPool(self.machine.layout, self.storage.pool_views(), self.storage.owner_words)

    def _progress(self) -> EngineProgress:
        status = self.engine.status()
        return EngineProgress(status.steps, status.has_work)

    def _hello(self) -> node_pb2.NodeHello:
        config = self.machine.config
        return node_pb2.NodeHello(
            entry=entry_to_wire(self._entry()),
            fingerprint=write_fingerprint(FINGERPRINT),
            model_id="toy",
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            step_limit_ms=round(STEP_LIMIT_S * 1000),
            kv_bytes_per_token=self.machine.layout.token_bytes,
        )

    def _entry(self) -> NodeEntry:
        return NodeEntry(self.machine.name, self.machine.role, self.machine.address, self.incarnation)

    async def _announce(self) -> None:
        """The registry is reached over no link: it is the embedded one, and its loss is another test's matter."""
        while True:
            await self.world.registry.announce(self._entry(), LEASE_S)
            await asyncio.sleep(ANNOUNCE_EVERY_S)

    # What is done to it.

    async def leave(self, grace_s: float) -> None:
        """What a node does on SIGTERM (`node.host`)."""
        self.service.drain()
        self._streams.status_changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.world.registry.withdraw(self.machine.name, self.incarnation)
                await self.service.idle.wait()
        self._streams.close("drained")
        await self.driver.close()

    def kill(self) -> None:
        self.world.loop.kill(self.process)
        self.transport.kill()
        self.world.wires.process_died(self.process)

    def stop(self) -> None:
        self.world.loop.stop(self.process)
        self.transport.stop()

    def resume(self) -> None:
        self.transport.resume()
        self.world.loop.resume(self.process)


class WatchedTransfers(MeteredTransfers):
    """Tells the books of each parcel."""

    def __init__(self, life: Life) -> None:
        super().__init__(METRICS)
        self._life = life

    def parcel(self, stage: ParcelStage, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None:
        super().parcel(stage, transfer, parcel_index, payload_bytes)
        found = self._life.driver.side.transfers.get(transfer)
        if found is not None:
            here, there = self._life.machine.name, found.peer
            prefill, decode = (there, here) if self._life.decodes else (here, there)
            self._life.world.books.parcel(stage, prefill, decode)


def engine_config(rng: random.Random, block_size: int, positions: int, decodes: bool) -> EngineConfig:
    """A pool for `positions`, and limits that make requests wait for each other."""
    seats = rng.randint(2, 6)
    return EngineConfig(
        block_size=block_size,
        num_blocks=positions // block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice((8, 16, 32, 64))),
        max_model_len=256,
        enable_prefix_caching=rng.random() < 0.8,
        overlap=rng.random() < 0.5,
        eos_token_ids=(END_OF_TEXT,),
    )
