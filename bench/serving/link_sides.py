"""The two processes of `link`: each with a transport, slots and a pool on its device. P does what D orders; D keeps the figures.

Must not know: how their figures are shown.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from bench.transfer_beside_ucx import (
    LAYOUT,
    LIMITS,
    MASTER,
    OWNER,
    D,
    EmptyDecode,
    P,
    ReadyPrefill,
    Unwatched,
    new_ticket,
    no_progress,
)
from foundation.ids import CreditNumber, RequestId, SessionNonce, TransferId
from kv_transfer.arena import Arena, HostSlots, slot_stride
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import TransferLimits
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.base import DataSession, Landed, ReceiveOutcome, SendOutcome, Sent, credit_tag
from kv_transfer.transport.ucx_environment import DEFAULT_LANES, DEVICE_LANES, ucx_environment
from node.engine_setup import SWITCH_INTERVAL_S
from node.options import DecodeOptions, PrefillOptions

IN_FLIGHT = 4
ROUNDS = 5
RAW_SESSION = 1
NONCE = SessionNonce(1)


@dataclass(frozen=True, slots=True)
class LinkPlan:
    prefill_device: str
    decode_device: str
    total_bytes: int
    slot_bytes: tuple[int, ...]

    @property
    def on_gpus(self) -> bool:
        return self.prefill_device.startswith("cuda")

    @property
    def positions(self) -> int:
        return self.total_bytes // LAYOUT.token_bytes

    def environment(self) -> dict[str, str]:
        return ucx_environment(DEVICE_LANES if self.on_gpus else DEFAULT_LANES, device=self.on_gpus)


class Side:
    """What both processes have: a transport, slots and a pool on their device."""

    def __init__(self, plan: LinkPlan, device: str, pipe: Connection) -> None:
        from kv_transfer.transport.ucx import UcxTransport

        if plan.on_gpus:
            sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a node does
        self.plan, self.pipe = plan, pipe
        pool = _new_pool(plan, device)
        self.pools = {"": pool}
        """By what a transfer over them is called."""
        if plan.on_gpus:
            self.pools[" without digests"] = plain = _noting(pool.pool, digests=False)
            plain.device = pool.device  # whose memory peers map
        self.transport = UcxTransport(pool.device) if plan.on_gpus else UcxTransport()
        runs = {size: IN_FLIGHT * slot_stride(size) for size in plan.slot_bytes}
        # Before a peer is met: it maps what is allocated by then.
        slots = pool.slots(sum(runs.values())) if plan.on_gpus else HostSlots()
        self.arenas = {size: Arena(IN_FLIGHT, size, slots.draw(run)) for size, run in runs.items()}
        self._next = 0

    async def hear(self) -> Any:
        return await asyncio.to_thread(self.pipe.recv)

    async def move(self, session: DataSession, arena: Arena, *, send: bool) -> float:
        """One round of the plan's bytes. The receiver's seconds, from its word to the last message."""
        count = self.plan.total_bytes // arena.slot_bytes
        first, self._next = self._next, self._next + count
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        started = ended = 0

        def start() -> None:
            nonlocal started
            tag = credit_tag(NONCE, CreditNumber(first + started))
            buffer = arena.message(started % IN_FLIGHT, arena.slot_bytes)
            started += 1
            session.send(tag, buffer, done) if send else session.post_receive(tag, buffer, done)

        def done(outcome: ReceiveOutcome | SendOutcome) -> None:
            nonlocal ended
            if not isinstance(outcome, Landed | Sent):
                finished.set_exception(RuntimeError(f"{outcome}"))
                return
            ended += 1
            if started < count:
                start()
            elif ended == count:
                finished.set_result(None)

        if send:
            await self.hear()
        for _ in range(min(IN_FLIGHT, count)):
            start()
        begun = time.perf_counter()
        if not send:
            self.pipe.send("go")
        await finished
        return time.perf_counter() - begun


def _new_pool(plan: LinkPlan, device: str) -> Any:
    blocks = 2 * plan.positions // LAYOUT.block_size
    if not plan.on_gpus:
        shape = (1, blocks, LAYOUT.layers, 2, LAYOUT.block_size, LAYOUT.kv_heads, LAYOUT.head_bytes)
        return KvPool(LAYOUT, (np.full(shape, 5, np.uint8),), np.full(blocks, OWNER, np.uint64))
    import torch

    from engine.kv_cache.device_storage import DeviceKvStorage
    from kv_transfer.device_copy import DevicePool

    layout = replace(LAYOUT, head_order="HND")
    torch.cuda.set_device(device)
    storage = DeviceKvStorage(layout, blocks, torch.device(device))
    storage.memory.normal_()
    storage.device_owner_words.fill_(OWNER)
    return _noting(DevicePool(layout, storage.memory, storage.device_owner_words))


def _noting(pool: Any, *, digests: bool = True) -> Any:
    """The pool with a copier that notes when gathers are asked for. Without `digests` copies neither hash nor check owners, and
    every digest is 0: for measuring what they cost."""
    from kv_transfer.device_staging import DeviceStaging
    from kv_transfer.staging import Copier, Gather, Gathered

    class NotingStaging(DeviceStaging):
        def __init__(self) -> None:
            super().__init__(pool, digests=digests)
            self.gathers_begun_s: list[float] = []

        def copier(self) -> Copier:
            copier = super().copier()
            gather = copier.gather

            def noting(job: Gather, done: Callable[[Gathered], None]) -> None:
                self.gathers_begun_s.append(time.monotonic())
                gather(job, done)

            copier.gather = noting  # type: ignore[method-assign]
            return copier

    return NotingStaging()


def _limits(plan: LinkPlan, slot_bytes: int, gpu_staging_bytes: int) -> TransferLimits:
    """Staging as nodes have it by default."""
    staging_bytes = gpu_staging_bytes if plan.on_gpus else LIMITS.staging_bytes
    return replace(LIMITS, staging_bytes=staging_bytes, slot_bytes=slot_bytes)


async def prefill_side(plan: LinkPlan, pipe: Connection, figures: Connection) -> None:
    """Does what the other side orders."""
    side, engine = Side(plan, plan.prefill_device, pipe), ReadyPrefill(plan.positions)
    arrived = side.transport.expect(RAW_SESSION, lambda reason: None)
    address = await side.transport.listen("127.0.0.1", 0)
    pipe.send(address)
    session = await arrived
    for slot_bytes in plan.slot_bytes:
        arena = side.arenas[slot_bytes]
        for send in (True, False):
            for _ in range(ROUNDS + 1):
                seconds = await side.move(session, arena, send=send)
                if not send:
                    pipe.send(seconds)
    for slot_bytes, pool in product(plan.slot_bytes, side.pools.values()):
        limits = _limits(plan, slot_bytes, PrefillOptions.staging_defaults["cuda"])
        keys = MASTER.for_node(P.node_id)
        driver = PrefillDriver(P, pool, limits, side.transport, address, keys, engine, no_progress, Unwatched())
        engine.driver = driver
        server = grpc.aio.server()
        driver.register(server)
        pipe.send((f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", driver.epoch))
        await server.start()
        gathers_begun_s = pool.gathers_begun_s if plan.on_gpus else []
        while await side.hear() != "over":
            pipe.send((engine.offered_s, min(gathers_begun_s, default=engine.offered_s)))
            gathers_begun_s.clear()
        await driver.close()
        await server.stop(0)
    await side.transport.close()


async def decode_side(plan: LinkPlan, pipe: Connection, figures: Connection) -> None:
    side = Side(plan, plan.decode_device, pipe)
    session = await side.transport.dial(await side.hear(), RAW_SESSION, lambda reason: None, 10.0)
    for slot_bytes in plan.slot_bytes:
        arena = side.arenas[slot_bytes]
        for receive in (True, False):
            seconds = []
            for _ in range(ROUNDS + 1):
                own_s = await side.move(session, arena, send=not receive)
                seconds.append(own_s if receive else await side.hear())
            way = "P to D" if receive else "D to P"
            rate = plan.total_bytes / statistics.median(seconds[1:]) / 1e9
            figures.send((f"messages {in_mib(slot_bytes)} {way}, {session.lane.name}", rate))
    for slot_bytes, (variant, pool) in product(plan.slot_bytes, side.pools.items()):
        engine = EmptyDecode(plan.positions)
        limits = _limits(plan, slot_bytes, DecodeOptions.staging_defaults["cuda"])
        driver = DecodeDriver(D, pool, limits, side.transport, engine, no_progress, Unwatched())
        engine.driver = driver
        control_address, epoch = await side.hear()
        spans = [await _transfer(side, driver, engine, control_address, epoch, n) for n in range(ROUNDS + 1)]
        pipe.send("over")
        await driver.close()
        for place, since in enumerate(("", ", from the offer")):
            rate = plan.total_bytes / statistics.median(span[place] for span in spans[1:]) / 1e9
            figures.send((f"transfers {in_mib(slot_bytes)} P to D{variant}{since}", rate))
    await side.transport.close()
    figures.send(None)


async def _transfer(
    side: Side, driver: DecodeDriver, engine: EmptyDecode, control_address: str, epoch: int, number: int
) -> tuple[float, float]:
    """Seconds to D's commit from P's first gather, and from its offer (on CPUs both from the offer)."""
    transfer = TransferId(RequestId(f"{control_address}-{number}"), 1, 1)
    prompt = tuple(range(side.plan.positions))
    engine.over = asyncio.get_running_loop().create_future()
    ticket = new_ticket(transfer.attempt_id, epoch, prompt)
    driver.begin(BeginTransfer(transfer, P.node_id, control_address, ticket, prompt, (), b"", 60.0))
    committed_s, _ = await engine.over
    side.pipe.send("offered")
    offered_s, gathered_s = await side.hear()
    return committed_s - gathered_s, committed_s - offered_s


def in_mib(size: int) -> str:
    return f"{size >> 20} MiB"
