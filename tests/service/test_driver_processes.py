"""A prefill node's process dies or hangs in the middle of a transfer, at a chosen parcel: what the decode driver makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from driver_pair import (
    FINGERPRINT,
    LIMITS,
    MASTER,
    SAMPLING,
    WHOLE,
    FakeDecodeEngine,
    Watcher,
    driver_pair,
    kv_of,
    make_pool,
    read_kv,
    until,
    use_ucx,
)

from bench.ports import free_port
from foundation.ids import Incarnation, NodeId, RequestId, TransferId
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import EngineProgress, NodeIdentity, TransferLimits
from kv_transfer.faults import VARIABLE
from kv_transfer.port import BeginTransfer, TransferAccount

pytestmark = pytest.mark.sockets

TOKENS = tuple(range(200, 328))
PARCEL_POSITIONS = 16
PARCELS = len(TOKENS) // PARCEL_POSITIONS
PATIENT = replace(LIMITS, silence_limit_s=20.0)
"""With these, what is known within a few seconds is not known by a silence."""
LONGEST_SILENCE_S = 2 * LIMITS.silence_limit_s + 1.0
"""A node that was itself stopped does not count that time, nor what is left of a heartbeat."""


@dataclass
class Far:
    """The prefill process."""

    process: asyncio.subprocess.Process
    control_address: str
    incarnation: Incarnation

    def state(self) -> str:
        """R, S, T (stopped), Z ... or gone, as the kernel says."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "gone"


@dataclass
class Near:
    driver: DecodeDriver
    engine: FakeDecodeEngine
    watcher: Watcher
    incarnation: Incarnation
    begun: list[TransferId] = field(default_factory=list)

    def begin(self, far: Far) -> TransferId:
        transfer = TransferId(RequestId("r"), len(self.begun) + 1, 1)
        self.begun.append(transfer)
        self.engine.histories[transfer] = TOKENS
        ticket = Ticket(
            transfer.attempt_id,
            1,
            self.incarnation,
            far.incarnation,
            0,
            digest_of_fingerprint(FINGERPRINT),
            digest_of_tokens(TOKENS, ()),
        )
        signed = sign_ticket(ticket, MASTER.for_node(NodeId("p0")))
        self.driver.begin(
            BeginTransfer(transfer, NodeId("p0"), far.control_address, signed, TOKENS, (), SAMPLING, 60.0)
        )
        return transfer

    async def outcome(self, transfer: TransferId, limit_s: float) -> tuple[str, TransferAccount]:
        await until(lambda: transfer in self.engine.outcomes, limit_s)
        return self.engine.outcomes[transfer]

    def check_prefix(self, transfer: TransferId, positions: int) -> None:
        if positions:
            found = read_kv(self.engine.pool, self.engine.blocks.taken[transfer], range(positions))[0]
            assert (found == kv_of(TOKENS[:positions], WHOLE)).all()


@asynccontextmanager
async def decode_node(limits: TransferLimits = LIMITS) -> AsyncIterator[Near]:
    transport = use_ucx()
    identity = NodeIdentity(NodeId("d0"), Incarnation(secrets.randbits(64)), FINGERPRINT, 0.1)
    engine, watcher = FakeDecodeEngine(make_pool(WHOLE, 1)), Watcher()
    driver = DecodeDriver(identity, engine.pool, limits, transport, engine, lambda: EngineProgress(0, False), watcher)
    engine.driver = driver
    try:
        yield Near(driver, engine, watcher, identity.incarnation)
    finally:
        await driver.close()
        await transport.close()


@asynccontextmanager
async def prefill_process(faults: str = "", control_port: str = "0") -> AsyncIterator[Far]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "driver_prefill_process.py"),
        control_port,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {VARIABLE: faults},
    )
    assert process.stdout is not None
    try:
        started = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        yield Far(process, started["control_address"], Incarnation(started["incarnation"]))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@pytest.mark.parametrize("landed", [1, PARCELS // 2, PARCELS - 1])
async def test_f01_a_p_killed_after_so_many_parcels_leaves_d_with_their_verified_prefix(landed: int) -> None:
    async with decode_node(PATIENT) as near, prefill_process(f"hold_sends_from={landed}") as far:
        transfer = near.begin(far)
        whole = landed * PARCEL_POSITIONS * WHOLE.token_bytes
        await until(lambda: near.watcher.payload("scattered", transfer) == whole)
        assert transfer not in near.engine.outcomes
        far.process.kill()
        await far.process.wait()
        reason, account = await near.outcome(transfer, limit_s=5.0)
        assert account.verified_positions == landed * PARCEL_POSITIONS
        assert account.payload_bytes == whole
        near.check_prefix(transfer, account.verified_positions)
        assert reason
        await until(lambda: near.driver.staging_drawn_bytes == 0)


async def test_f02_a_p_stopped_mid_transfer_is_given_up_in_time_and_changes_nothing_when_it_wakes() -> None:
    async with decode_node() as near, prefill_process("stop_before_send=3") as far:
        transfer = near.begin(far)
        await until(lambda: far.state() == "T")
        reason, account = await near.outcome(transfer, limit_s=LONGEST_SILENCE_S)
        assert reason in ("silent", "transfer_stalled")
        assert account.verified_positions <= 3 * PARCEL_POSITIONS, "more parcels than P had begun to send"
        near.check_prefix(transfer, account.verified_positions)
        await until(lambda: near.driver.staging_drawn_bytes == 0)
        before = [shard.copy() for shard in near.engine.pool.shards]
        far.process.send_signal(signal.SIGCONT)
        again = near.begin(far)
        assert (await near.outcome(again, limit_s=20.0))[0] == "committed"
        near.check_prefix(again, len(TOKENS))
        abandoned = list(near.engine.blocks.taken[transfer])
        for shard, kept in zip(near.engine.pool.shards, before, strict=True):
            assert (shard[:, abandoned] == kept[:, abandoned]).all()


async def test_f22_a_p_restarted_under_the_same_address_is_paired_anew_at_once() -> None:
    port = str(free_port())
    async with decode_node() as near:
        async with prefill_process(control_port=port) as far:
            assert (await near.outcome(near.begin(far), 20.0))[0] == "committed"
            far.process.kill()
            await far.process.wait()
        async with prefill_process(control_port=port) as fresh:
            assert fresh.control_address == far.control_address
            transfer = near.begin(fresh)
            assert (await near.outcome(transfer, 10.0))[0] == "committed"
            near.check_prefix(transfer, len(TOKENS))


async def test_f04_a_d_killed_mid_transfer_leaves_nothing_on_p_within_the_bound() -> None:
    async with driver_pair(ucx=True) as pair:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parent / "driver_decode_process.py"),
            json.dumps(
                {
                    "control_address": pair.proxy.address,
                    "prefill_incarnation": pair.prefill_identity.incarnation,
                    "tokens": TOKENS,
                }
            ),
            env=os.environ | {VARIABLE: "kill_after_landed=3"},
        )
        try:
            assert await asyncio.wait_for(process.wait(), 60.0) == -signal.SIGKILL, "three parcels landed"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await until(lambda: not pair.prefill_engine.blocks.taken, limit_s=1.0)
        await pair.at_rest()
        await until(lambda: not pair.prefill.side.peers, limit_s=LONGEST_SILENCE_S)
