"""One decode driver and one prefill driver in one process, over real gRPC on loopback, with engines that are fakes by name.

The fake prefill engine writes KV that is a function of the token ids into blocks of its own; the fake decode engine hands out
blocks and keeps what it is told. So a test can say, for every position, what must stand in D's pool.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal
from unittest.mock import patch

import grpc
import numpy as np
import pytest
from decant_proto.v1 import types_pb2
from waiting import until as until

from foundation.fingerprint import Fingerprint
from foundation.ids import BlockId, Incarnation, NodeId, RequestId, TransferId
from foundation.keys import MasterKeys
from foundation.kv_layout import KvLayout
from foundation.kv_shards import shard_shape, shards
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import EngineProgress, NodeIdentity, TransferLimits
from kv_transfer.faults import Faults
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer, PrefillRequest, SettledToken, TransferAccount
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.base import Lane, Transport, TransportError
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.memory_network import FENCED, MemoryNetwork
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

FINGERPRINT = Fingerprint("w1", "llama", "tok", 1000, "float32", "none", "rope", 1)
MASTER = MasterKeys(((1, b"k" * 32),))
POOL_BLOCKS = 64
SAMPLING = types_pb2.SamplingParameters(seed=1, max_tokens=4).SerializeToString(deterministic=True)
WHOLE = KvLayout(layers=4, kv_heads=3, head_dim=8, dtype="float32", block_size=16, layer_group=4)
THREE_SHARDS = replace(WHOLE, block_size=32, tensor_parallel=3, head_order="HND")
LIMITS = TransferLimits(staging_bytes=1 << 20, slot_bytes=16 << 10)


def make_pool(layout: KvLayout, seed: int) -> KvPool:
    """Random bytes everywhere, so that nothing is right by chance."""
    random = np.random.default_rng(seed)
    arrays = tuple(
        random.standard_normal(shard_shape(layout, shard, POOL_BLOCKS), np.float32).view(np.uint8)
        for shard in shards(layout)
    )
    return KvPool(layout, arrays, np.zeros(POOL_BLOCKS, np.uint64))


def kv_of(tokens: Sequence[int], layout: KvLayout) -> np.ndarray:
    """[layer, 2, position, head, dim]: what the whole model's KV of this history is."""
    rows = [np.random.default_rng(token).standard_normal((layout.layers, 2, 6, 16), np.float32) for token in tokens]
    return np.stack(rows, axis=2)[:, :, :, : layout.kv_heads, : layout.head_dim]


def place_kv(pool: KvPool, block_ids: Sequence[int], kv: np.ndarray, first: int = 0) -> None:
    """Write `kv`, whose positions begin at `first`, wherever a shard of this node holds it: position by position."""
    layout = pool.layout
    for stored, shard in zip(pool.shards, shards(layout), strict=True):
        array = stored.view(np.float32)
        part = kv[shard.first_layer : shard.end_layer, :, :, shard.first_head : shard.end_head]
        part = part.reshape(array.shape[0], array.shape[2], *part.shape[1:])
        for index in range(kv.shape[2]):
            block, offset = divmod(first + index, layout.block_size)
            place = (offset, slice(None)) if layout.head_order == "NHD" else (slice(None), offset)
            array[(slice(None), block_ids[block], slice(None), slice(None), *place)] = part[:, :, :, index]


def read_kv(pool: KvPool, block_ids: Sequence[int], positions: range) -> list[np.ndarray]:
    """What each shard holds, [layer, 2, position, head, dim]."""
    found = []
    for stored in pool.shards:
        array, rows = stored.view(np.float32), []
        for position in positions:
            block, offset = divmod(position, pool.layout.block_size)
            place = (offset, slice(None)) if pool.layout.head_order == "NHD" else (slice(None), offset)
            run = array[(slice(None), block_ids[block], slice(None), slice(None), *place)]
            rows.append(run.reshape(-1, *run.shape[2:]))
        found.append(np.stack(rows, axis=2))
    return found


class Blocks:
    """Hands out blocks of a pool; `taken` must be empty again in the end."""

    def __init__(self) -> None:
        self.free = list(range(POOL_BLOCKS))
        self.taken: dict[TransferId, tuple[BlockId, ...]] = {}

    def take(self, transfer: TransferId, number: int) -> tuple[BlockId, ...]:
        assert len(self.free) >= number, "the fake engine has no blocks left"
        ids, self.free = self.free[:number][::-1], self.free[number:]
        self.taken[transfer] = tuple(BlockId(block) for block in ids)
        return self.taken[transfer]

    def give_back(self, transfer: TransferId) -> None:
        self.free += list(self.taken.pop(transfer, ()))


@dataclass
class FakePrefillEngine:
    """Computes `chunk` positions at a time, those from `hold_at` on once it is None: slow, but never stalled, for it goes on
    taking steps. With `layers_at_once` it tells of a chunk's layers by so many, and is held, or fails, before the last."""

    pool: KvPool
    chunk: int = 64
    cached: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    driver: PrefillDriver | None = None
    refuse_with: str = ""
    declines: bool = False
    fail_at: int | None = None
    hold_at: int | None = None
    layers_at_once: int | None = None
    steps: int = 0
    released_reasons: dict[TransferId, str] = field(default_factory=dict)
    tasks: dict[TransferId, asyncio.Task[None]] = field(default_factory=dict)

    def progress(self) -> EngineProgress:
        return EngineProgress(self.steps, bool(self.tasks))

    def prefill(self, request: PrefillRequest) -> None:
        assert self.driver is not None
        if self.refuse_with:
            self.driver.refuse(request.transfer, self.refuse_with, 0.5)
            return
        self.tasks[request.transfer] = asyncio.create_task(self._compute(self.driver, request))

    def released(self, transfer: TransferId, reason: str) -> None:
        self.released_reasons[transfer] = reason
        if task := self.tasks.pop(transfer, None):
            task.cancel()
        self.pool.owner_words[list(self.blocks.taken.get(transfer, ()))] = 0
        self.blocks.give_back(transfer)

    async def _compute(self, driver: PrefillDriver, request: PrefillRequest) -> None:
        tokens = request.prompt + request.settled
        ids = self.blocks.take(request.transfer, -(-len(tokens) // self.pool.layout.block_size))
        word = secrets.randbits(63) | 1
        self.pool.owner_words[list(ids)] = word
        place_kv(self.pool, ids, kv_of(tokens[: self.cached], self.pool.layout)) if self.cached else None
        driver.reserved(request.transfer, ids, [word] * len(ids), min(self.cached, len(tokens)), len(tokens))
        for first in range(self.cached, len(tokens), self.chunk):
            await asyncio.sleep(0)
            end = min(first + self.chunk, len(tokens))
            kv = kv_of(tokens[first:end], self.pool.layout)
            for end_layer in range(self.layers_at_once or len(kv), len(kv), self.layers_at_once or len(kv)):
                place_kv(
                    self.pool, ids, np.where(np.arange(len(kv))[:, None, None, None, None] < end_layer, kv, 0), first
                )
                driver.layers_computed(request.transfer, end, end_layer)
            while self.hold_at is not None and first >= self.hold_at:
                self.steps += 1
                await asyncio.sleep(0.005)
            if self.fail_at is not None and first >= self.fail_at:
                driver.failed(request.transfer, "engine_error")
                return
            place_kv(self.pool, ids, kv, first)
            self.steps += 1
            driver.computed(request.transfer, end)
        token = SettledToken(sum(tokens) % 1000, -0.5, ((7, -1.5),))
        driver.first_token(request.transfer, None if self.declines else [token])
        await asyncio.Event().wait()


@dataclass
class FakeDecodeEngine:
    """Reserves blocks at once; `cached` positions stand in them already."""

    pool: KvPool
    cached: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    driver: DecodeDriver | None = None
    unavailable_reason: str = ""
    tokens: dict[TransferId, SettledToken | None] = field(default_factory=dict)
    outcomes: dict[TransferId, tuple[str, TransferAccount]] = field(default_factory=dict)
    order: list[tuple[str, TransferId]] = field(default_factory=list)
    histories: dict[TransferId, tuple[int, ...]] = field(default_factory=dict)

    def reserve(self, transfer: TransferId, end_position: int) -> None:
        assert self.driver is not None
        if self.unavailable_reason:
            self.driver.unavailable(transfer, self.unavailable_reason)
            return
        block_size = self.pool.layout.block_size
        ids = self.blocks.take(transfer, -(-end_position // block_size))
        cached = min(self.cached, end_position) // block_size * block_size
        place_kv(self.pool, ids, kv_of(self.histories[transfer][:cached], self.pool.layout)) if cached else None
        self.driver.reserved(transfer, ids, cached, end_position)

    def first_token(self, transfer: TransferId, token: SettledToken | None) -> None:
        assert transfer not in self.tokens, f"{transfer} was told its first token twice"
        self.order.append(("first_token", transfer))
        self.tokens[transfer] = token

    def committed(self, transfer: TransferId, account: TransferAccount) -> None:
        self._over(transfer, "committed", account)

    def ended(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        self._over(transfer, reason, account)

    def _over(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        assert transfer not in self.outcomes, f"{transfer} ended twice"
        self.order.append(("over", transfer))
        self.outcomes[transfer] = reason, account


@dataclass
class Watcher:
    """A `TransferObserver` that keeps everything, in order."""

    parcels: list[tuple[str, TransferId, int, int]] = field(default_factory=list)
    early_parcels: list[tuple[TransferId, int]] = field(default_factory=list)
    lanes: list[tuple[NodeId, str, float]] = field(default_factory=list)
    drops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slot_states: dict[str, int] = field(default_factory=dict)

    def computed(self, transfer: TransferId, positions: int) -> None:
        pass

    def parcel(self, stage: str, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None:
        self.parcels.append((stage, transfer, parcel_index, payload_bytes))

    def early(self, transfer: TransferId, parcel_index: int) -> None:
        self.early_parcels.append((transfer, parcel_index))

    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None:
        self.lanes.append((peer, lane, gigabytes_per_second))

    def dropped(self, peer: NodeId, reason: str) -> None:
        self.drops[reason] += 1

    def slots(self, **states: int) -> None:
        self.slot_states = states

    def payload(self, stage: str, transfer: TransferId) -> int:
        return sum(size for found, whose, _, size in self.parcels if found == stage and whose == transfer)


class Proxy:
    """Stands in the control stream's way: `cut` breaks what flows and refuses new connections until `heal`; `mute` swallows
    one direction without a word."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.cuts = 0
        self._down = False
        self._muted: set[str] = set()
        self.swallowed_bytes = 0
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._down = True
        self.cuts += len(self._writers)
        for writer in self._writers:
            writer.transport.abort()

    def mute(self, direction: Literal["to_prefill", "to_decode"]) -> None:
        self._muted.add(direction)

    def heal(self) -> None:
        """What was swallowed is lost, so the connections that lost it are broken as well."""
        if self._muted:
            self.cut()
        self._down, self._muted = False, set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers |= {writer, there_writer}
        to_prefill = self._copy(reader, there_writer, "to_prefill")
        await asyncio.gather(to_prefill, self._copy(there_reader, writer, "to_decode"))
        self._writers -= {writer, there_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        try:
            while data := await reader.read(1 << 16):
                if direction in self._muted:
                    self.swallowed_bytes += len(data)
                    continue
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@dataclass
class Pair:
    decode: DecodeDriver
    prefill: PrefillDriver
    decode_engine: FakeDecodeEngine
    prefill_engine: FakePrefillEngine
    decode_watcher: Watcher
    prefill_watcher: Watcher
    proxy: Proxy
    decode_identity: NodeIdentity
    prefill_identity: NodeIdentity
    near: Transport
    far: Transport
    data_address: str
    open_transport: Callable[[], Transport]
    numbers: Any = field(default_factory=lambda: count(1))

    def begin(self, tokens: Sequence[int], ticket: bytes | None = None, try_number: int = 1) -> TransferId:
        transfer = TransferId(RequestId(f"r{next(self.numbers)}"), 1, try_number)
        return self.begin_as(transfer, tokens, ticket)

    def begin_as(self, transfer: TransferId, tokens: Sequence[int], ticket: bytes | None = None) -> TransferId:
        prompt = tuple(tokens)
        self.decode_engine.histories[transfer] = prompt
        self.decode.begin(
            BeginTransfer(
                transfer,
                self.prefill_identity.node_id,
                self.proxy.address,
                self.ticket(transfer, prompt) if ticket is None else ticket,
                prompt,
                (),
                SAMPLING,
                60.0,
            )
        )
        return transfer

    def ticket(self, transfer: TransferId, prompt: tuple[int, ...], **changed: Any) -> bytes:
        ticket = Ticket(
            transfer.attempt_id,
            4,
            self.decode_identity.incarnation,
            self.prefill_identity.incarnation,
            self.prefill.epoch,
            digest_of_fingerprint(self.prefill_identity.fingerprint),
            digest_of_tokens(prompt, ()),
        )
        return sign_ticket(replace(ticket, **changed), MASTER.for_node(self.prefill_identity.node_id))

    async def outcome(self, transfer: TransferId, limit_s: float = 15.0) -> tuple[str, TransferAccount]:
        await until(lambda: transfer in self.decode_engine.outcomes, limit_s)
        return self.decode_engine.outcomes[transfer]

    def check_landed(self, transfer: TransferId, tokens: Sequence[int], end_position: int) -> None:
        """Positions [0, end_position) hold this history's KV, in every shard."""
        layout = self.decode_engine.pool.layout
        if end_position == 0:
            return
        kv = kv_of(tokens[:end_position], layout)
        found = read_kv(self.decode_engine.pool, self.decode_engine.blocks.taken[transfer], range(end_position))
        for array, shard in zip(found, shards(layout), strict=True):
            part = kv[shard.first_layer : shard.end_layer, :, :, shard.first_head : shard.end_head]
            np.testing.assert_array_equal(array, part)

    async def stranger_is_refused(self, session: int) -> None:
        """A second caller that knows the number of a live session gets nowhere."""
        refused = self.far.strangers_refused
        with pytest.raises(TransportError, match="not_expected"):
            await self.near.dial(self.data_address, session, lambda reason: None, 5.0)
        assert self.far.strangers_refused == refused + 1

    async def at_rest(self) -> None:
        """Nothing is under way on either side: no transfer, no credit, no pinned block."""

        def resting() -> bool:
            arenas = self.decode.side.arenas.values()
            return (
                not self.decode.side.transfers
                and not self.prefill.side.transfers
                and all(arena.settled for arena in arenas)
                and not self.prefill_engine.blocks.taken
                and all(slot.state.name == "FREE" for slot in self.prefill.side.sending.slots)
            )

        await until(resting)
        for arena in self.decode.side.arenas.values():
            arena.check()


def use_ucx() -> Transport:
    """Over TCP. UCX reads its settings here and now; what this process starts later chooses for itself."""
    from kv_transfer.transport.ucx import UcxTransport

    with patch.dict(os.environ):
        apply_ucx_environment(ucx_environment("tcp", interface="lo"))
        return UcxTransport()


@asynccontextmanager
async def driver_pair(
    *,
    source: KvLayout = WHOLE,
    target: KvLayout = WHOLE,
    ucx: bool = False,
    lane: Lane = FENCED,
    limits: TransferLimits = LIMITS,
    decode_fingerprint: Fingerprint = FINGERPRINT,
    decode_faults: Faults | None = None,
    prefill_faults: Faults | None = None,
) -> AsyncIterator[Pair]:
    open_transport = use_ucx if ucx else partial(MemoryTransport, MemoryNetwork(lane))
    near, far = open_transport(), open_transport()
    data_address = await far.listen("127.0.0.1", 0)
    decode_identity = NodeIdentity(NodeId("d0"), Incarnation(secrets.randbits(64)), decode_fingerprint, 0.5)
    prefill_identity = NodeIdentity(NodeId("p0"), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.5)
    decode_engine, prefill_engine = FakeDecodeEngine(make_pool(target, 1)), FakePrefillEngine(make_pool(source, 2))
    decode_watcher, prefill_watcher = Watcher(), Watcher()
    prefill = PrefillDriver(
        prefill_identity, prefill_engine.pool, limits, far, data_address, MASTER.for_node(NodeId("p0")), prefill_engine,
        prefill_engine.progress, prefill_watcher, prefill_faults,
    )  # fmt: skip
    decode = DecodeDriver(
        decode_identity, decode_engine.pool, limits, near, decode_engine, lambda: EngineProgress(0, False),
        decode_watcher, decode_faults,
    )  # fmt: skip
    decode_engine.driver, prefill_engine.driver = decode, prefill
    server = grpc.aio.server()
    prefill.register(server)
    proxy = Proxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await proxy.start()
    try:
        yield Pair(
            decode, prefill, decode_engine, prefill_engine, decode_watcher, prefill_watcher, proxy, decode_identity,
            prefill_identity, near, far, data_address, open_transport,
        )  # fmt: skip
    finally:
        await decode.close()
        await prefill.close()
        await server.stop(0)
        await proxy.close()
        await near.close()
        await far.close()
        for task in prefill_engine.tasks.values():
            task.cancel()


@asynccontextmanager
async def another_decode_node(pair: Pair, name: str, target: KvLayout = WHOLE) -> AsyncIterator[Pair]:
    """A second decode node with a pool of its own, paired with the same prefill node."""
    near, watcher = pair.open_transport(), Watcher()
    identity = NodeIdentity(NodeId(name), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.5)
    engine = FakeDecodeEngine(make_pool(target, 3))
    engine.driver = DecodeDriver(identity, engine.pool, LIMITS, near, engine, lambda: EngineProgress(0, False), watcher)
    try:
        yield replace(
            pair,
            decode=engine.driver,
            decode_engine=engine,
            decode_watcher=watcher,
            decode_identity=identity,
            near=near,
        )
    finally:
        await engine.driver.close()
        await near.close()


@asynccontextmanager
async def another_prefill_node(
    pair: Pair, name: str, limits: TransferLimits = LIMITS, faults: Faults | None = None
) -> AsyncIterator[Pair]:
    """A second prefill node, behind a proxy of its own, for the same decode node."""
    far, watcher = pair.open_transport(), Watcher()
    identity = NodeIdentity(NodeId(name), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.5)
    engine = FakePrefillEngine(make_pool(WHOLE, 4))
    data_address = await far.listen("127.0.0.1", 0)
    engine.driver = PrefillDriver(
        identity, engine.pool, limits, far, data_address, MASTER.for_node(identity.node_id), engine,
        engine.progress, watcher, faults,
    )  # fmt: skip
    server = grpc.aio.server()
    engine.driver.register(server)
    proxy = Proxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await proxy.start()
    try:
        yield replace(
            pair,
            prefill=engine.driver,
            prefill_engine=engine,
            prefill_watcher=watcher,
            prefill_identity=identity,
            proxy=proxy,
            far=far,
            data_address=data_address,
        )
    finally:
        await engine.driver.close()
        await server.stop(0)
        await proxy.close()
        await far.close()
        for task in engine.tasks.values():
            task.cancel()
