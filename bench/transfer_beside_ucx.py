"""What a transfer of 64 MiB costs beside UCX's own benchmark, same lane, same run: `python -m bench.transfer_beside_ucx`.

Two processes, real drivers, real gRPC on loopback; P's KV is all computed, so that nothing but the transfer takes time. Each
round measures, one after the other: `ucx_perftest tag_bw` with messages of slot size (the better of polling and sleeping);
sends of the data plane alone, from the first send to the last message landed; a whole transfer, from P's offer to D's commit;
the same without digests. Medians and ratios are printed, and where the copying threads spent a transfer's time. Rounds
alternate, so that a busy machine harms all alike; on such a machine only the ratios mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import libucx
import numpy as np

from bench.ports import free_port
from bench.transfer_lane import IN_FLIGHT, TRANSFER_BYTES, report, rounds
from foundation.fingerprint import Fingerprint
from foundation.ids import AttemptId, BlockId, Incarnation, NodeId, RequestId, TransferId
from foundation.keys import MasterKeys
from foundation.kv_layout import KvLayout
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket
from kv_transfer import staging
from kv_transfer.arena import Arena
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import EngineProgress, NodeIdentity, TransferLimits
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer, PrefillRequest, SettledToken, TransferAccount
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16, layer_group=32)
POSITIONS = TRANSFER_BYTES // LAYOUT.token_bytes
BLOCKS = POSITIONS // LAYOUT.block_size
LIMITS = TransferLimits(staging_bytes=512 << 20, slot_bytes=4 << 20)
PARCELS = TRANSFER_BYTES // LIMITS.slot_bytes
FINGERPRINT = Fingerprint("weights", "architecture", "tokenizer", 1000, "bfloat16", "none", "rope", 1)
MASTER = MasterKeys(((1, b"k" * 32),))
P, D = (NodeIdentity(NodeId(name), Incarnation(number), FINGERPRINT, 0.5) for name, number in (("p", 1), ("d", 2)))
RAW_SESSION = 1
OWNER = 7


def new_pool(value: int) -> KvPool:
    shape = (1, 2 * BLOCKS, 32, 2, LAYOUT.block_size, LAYOUT.kv_heads, LAYOUT.head_bytes)
    return KvPool(LAYOUT, (np.full(shape, value, np.uint8),), np.full(2 * BLOCKS, OWNER, np.uint64))


def strewn_blocks(seed: int, count: int = BLOCKS) -> list[BlockId]:
    """Half of a pool of 2 x `count` blocks."""
    return [BlockId(int(block)) for block in np.random.default_rng(seed).permutation(2 * count)[:count]]


def no_progress() -> EngineProgress:
    return EngineProgress(0, False)


class Unwatched:
    """A `TransferObserver` of nothing."""

    def computed(self, transfer: TransferId, positions: int) -> None: ...
    def early(self, transfer: TransferId, parcel_index: int) -> None: ...
    def parcel(self, stage: str, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None: ...
    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None: ...
    def dropped(self, peer: NodeId, reason: str) -> None: ...
    def slots(self, **states: int) -> None: ...


class CopyClock:
    """Seconds that the copier thread spends in each step, and the switch for digests."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self.digests = True
        for name in ("gather_parcel", "scatter_parcel", "payload_digest"):
            setattr(staging, name, self._timed(name, getattr(staging, name)))

    def _timed(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if name == "payload_digest" and not self.digests:
                return 0
            began_s = time.perf_counter()
            result = step(*arguments)
            self.spent_s[name] += time.perf_counter() - began_s
            return result

        return timed

    def take(self) -> dict[str, float]:
        spent, self.spent_s = self.spent_s, defaultdict(float)
        return dict(spent)


class ReadyPrefill:
    """P's engine: everything is computed before anybody asks, in blocks strewn over its pool."""

    def __init__(self, positions: int = POSITIONS) -> None:
        self.driver: PrefillDriver | None = None
        self.offered_s = 0.0
        self._positions = positions
        self._blocks = strewn_blocks(1, positions // LAYOUT.block_size)

    def prefill(self, request: PrefillRequest) -> None:
        assert self.driver is not None
        self.offered_s = time.monotonic()
        owners = [OWNER] * len(self._blocks)
        self.driver.reserved(request.transfer, self._blocks, owners, self._positions, self._positions)
        self.driver.first_token(request.transfer, [SettledToken(7)])

    def released(self, transfer: TransferId, reason: str) -> None: ...


class EmptyDecode:
    """D's engine: it has room for everything."""

    def __init__(self, positions: int = POSITIONS) -> None:
        self.driver: DecodeDriver | None = None
        self._blocks = strewn_blocks(2, positions // LAYOUT.block_size)
        self.over: asyncio.Future[tuple[float, str]] = asyncio.get_running_loop().create_future()

    def reserve(self, transfer: TransferId, end_position: int) -> None:
        assert self.driver is not None
        self.driver.reserved(transfer, self._blocks, 0, end_position)

    def first_token(self, transfer: TransferId, token: SettledToken | None) -> None: ...

    def committed(self, transfer: TransferId, account: TransferAccount) -> None:
        self.over.set_result((time.monotonic(), account.lane))

    def ended(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        self.over.set_exception(RuntimeError(f"{transfer} ended: {reason}"))


async def prefill_side(pipe: Connection) -> None:
    """Does what D orders, until D says None."""
    clock, engine, transport, pool = CopyClock(), ReadyPrefill(), UcxTransport(), new_pool(5)
    expected = transport.expect(RAW_SESSION, lambda reason: None)
    address = await transport.listen("127.0.0.1", 0)
    keys = MASTER.for_node(P.node_id)
    driver = PrefillDriver(P, pool, LIMITS, transport, address, keys, engine, no_progress, Unwatched())
    engine.driver = driver
    server = grpc.aio.server()
    driver.register(server)
    pipe.send((address, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"))
    await server.start()
    raw, arena, first = await expected, Arena(IN_FLIGHT, LIMITS.slot_bytes), 0
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        match order:
            case "raw":
                await rounds(raw, arena, LIMITS.slot_bytes, first, send=True, repeat=1)
                first += PARCELS
            case "spent":
                pipe.send((engine.offered_s, clock.take()))
            case bool(digests):
                clock.digests = digests
                pipe.send(driver.epoch)
    await driver.close()
    await server.stop(0)
    await transport.close()


class DecodeSide:
    """Orders the rounds, and keeps their figures."""

    def __init__(self, lanes: str, pipe: Connection) -> None:
        self.lanes, self.pipe = lanes, pipe
        self.clock, self.transport, self.engine = CopyClock(), UcxTransport(), EmptyDecode()
        self.driver = DecodeDriver(D, new_pool(0), LIMITS, self.transport, self.engine, no_progress, Unwatched())
        self.engine.driver = self.driver
        self.data_address, self.control_address = pipe.recv()
        self.begun = 0
        self.lane = ""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.steps: dict[str, list[float]] = defaultdict(list)

    async def run(self, repeat: int) -> None:
        raw = await self.transport.dial(self.data_address, RAW_SESSION, lambda reason: None, 10.0)
        arena = Arena(IN_FLIGHT, LIMITS.slot_bytes)
        for number in range(repeat + 1):
            took_s = {"ucx_perftest": await asyncio.to_thread(best_ucx_perftest_s, self.lanes)}
            self.pipe.send("raw")
            first = number * PARCELS
            (took_s["sent to landed"],) = await rounds(raw, arena, LIMITS.slot_bytes, first, send=False, repeat=1)
            took_s["without digests"], _ = await self._transfer(digests=False)
            took_s["offered to committed"], spent_s = await self._transfer(digests=True)
            for figures, new in ((self.seconds, took_s), (self.steps, spent_s)):
                for name, figure_s in new.items() if number else ():  # the first round warms everything up
                    figures[name].append(figure_s)
        self.pipe.send(None)
        self._report()
        await self.driver.close()
        await self.transport.close()

    async def _transfer(self, *, digests: bool) -> tuple[float, dict[str, float]]:
        self.clock.digests = digests
        self.pipe.send(digests)
        epoch = self.pipe.recv()
        self.clock.take()
        self.begun += 1
        transfer, prompt = TransferId(RequestId(f"r{self.begun}"), 1, 1), tuple(range(POSITIONS))
        self.engine.over = asyncio.get_running_loop().create_future()
        ticket = new_ticket(transfer.attempt_id, epoch, prompt)
        self.driver.begin(BeginTransfer(transfer, P.node_id, self.control_address, ticket, prompt, (), b"", 60.0))
        committed_s, self.lane = await self.engine.over
        self.pipe.send("spent")
        offered_s, theirs = self.pipe.recv()
        ours = self.clock.take()
        digest_s = theirs.pop("payload_digest", 0.0) + ours.pop("payload_digest", 0.0)
        return committed_s - offered_s, theirs | ours | {"digests of both": digest_s}

    def _report(self) -> None:
        middle = {name: statistics.median(took_s) for name, took_s in self.seconds.items()}
        for name, took_s in middle.items():
            shares = [ucx / ours for ucx, ours in zip(self.seconds["ucx_perftest"], self.seconds[name], strict=True)]
            rate = TRANSFER_BYTES / took_s / 1e9
            report(f"{self.lane}: {name}: {rate:.2f} GB/s, {statistics.median(shares):.0%} of ucx_perftest")
        whole_s = middle["offered to committed"]
        steps = ", ".join(f"{name} {statistics.median(it) / whole_s:.0%}" for name, it in sorted(self.steps.items()))
        sending = middle["sent to landed"] / whole_s
        report(f"{self.lane}: a transfer's {whole_s * 1e3:.0f} ms, side by side: {steps}, sent to landed {sending:.0%}")


def new_ticket(attempt: AttemptId, epoch: int, prompt: tuple[int, ...]) -> bytes:
    agreed = digest_of_fingerprint(FINGERPRINT)
    ticket = Ticket(attempt, 1, D.incarnation, P.incarnation, epoch, agreed, digest_of_tokens(prompt, ()))
    return sign_ticket(ticket, MASTER.for_node(P.node_id))


def best_ucx_perftest_s(lanes: str) -> float:
    """Polling is faster on cores of its own, sleeping on cores that others want, too."""
    return min(ucx_perftest_s(lanes, waiting) for waiting in ("poll", "sleep"))


def ucx_perftest_s(lanes: str, waiting: str) -> float:
    """Seconds for TRANSFER_BYTES in messages of slot size, as UCX's own benchmark has it, with our settings."""
    home = Path(libucx.__file__).parent
    environment = {**os.environ, **ucx_environment(lanes), "LD_LIBRARY_PATH": str(home / "lib")}
    common = [str(home / "bin/ucx_perftest"), "-p", str(free_port()), "-E", waiting, "-e"]
    client = [*common, "-t", "tag_bw", "-s", str(LIMITS.slot_bytes), "-n", str(2 * PARCELS), "-w", "4", "127.0.0.1"]
    server = subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):  # until the server listens
            ran = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=300)
            if ran.returncode == 0:
                final = next(line.split() for line in ran.stdout.splitlines() if line.startswith("Final:"))
                return TRANSFER_BYTES / (float(final[6]) * (1 << 20))
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    raise RuntimeError(f"ucx_perftest -E {waiting} does not run: {ran.stdout[-500:]} {ran.stderr[-500:]}")


async def decode_side(lanes: str, pipe: Connection, repeat: int) -> None:
    await DecodeSide(lanes, pipe).run(repeat)


def run_side(lanes: str, pipe: Connection, prefill: bool, repeat: int) -> None:
    apply_ucx_environment(ucx_environment(lanes))
    asyncio.run(prefill_side(pipe) if prefill else decode_side(lanes, pipe, repeat))


def measure(lanes: str, repeat: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    processes = [spawn.Process(target=run_side, args=(lanes, end, end is ends[0], repeat)) for end in ends]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a side ended with {process.exitcode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="*", default=["tcp", "sm,self,tcp"], help="values of UCX_TLS to measure")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    for lanes in arguments.lanes:
        measure(lanes, arguments.rounds)


if __name__ == "__main__":
    main()
