"""GB/s of the data plane and of the copies beside it: `python -m bench.transfer_lane`, one line a figure.

Two processes, one session. A transfer is 64 MiB in slots of one size, four receives open at once; its time runs from the
first send to the last message landed. The best and the median of the rounds are printed, for each lane and slot size; then
gather, scatter and digest of 4 MiB parcels, with no transport at all. Pin the processes and keep the machine quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from foundation.ids import CreditNumber, SessionNonce
from foundation.kv_layout import KvLayout
from kv_transfer.arena import Arena
from kv_transfer.digest import TRAILER_BYTES, payload_digest
from kv_transfer.plan.parcels import cut_parcels
from kv_transfer.pool_copy import KvPool, gather_parcel, scatter_parcel
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.base import Bytes, DataSession, Landed, ReceiveOutcome, SendOutcome, Sent, credit_tag
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

TRANSFER_BYTES = 64 << 20
SLOT_SIZES = (1 << 20, 4 << 20, 8 << 20, 16 << 20)
IN_FLIGHT = 4
ROUNDS = 12
NONCE = SessionNonce(1)
SESSION = 1


class Pump:
    """Keeps IN_FLIGHT operations open until all messages of a round are through."""

    def __init__(
        self, start: Callable[[int, Callable[[ReceiveOutcome | SendOutcome], None]], None], count: int
    ) -> None:
        self._start, self._count = start, count
        self._started = self._ended = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for _ in range(min(IN_FLIGHT, count)):
            self._next()

    def _next(self) -> None:
        self._started += 1
        self._start(self._started - 1, self._done)

    def _done(self, outcome: ReceiveOutcome | SendOutcome) -> None:
        assert isinstance(outcome, Landed | Sent), outcome
        self._ended += 1
        if self._started < self._count:
            self._next()
        elif self._ended == self._count:
            self.finished.set_result(None)


async def rounds(
    session: DataSession, arena: Arena, slot_bytes: int, first: int, *, send: bool, repeat: int = ROUNDS
) -> list[float]:
    """Seconds of each round, on the receiver; the sender's figures mean nothing."""
    count, seconds = TRANSFER_BYTES // slot_bytes, []
    for number in range(first, first + repeat * count, count):

        def start(index: int, done: Callable[..., None], number: int = number) -> None:
            tag, buffer = credit_tag(NONCE, CreditNumber(number + index)), arena.message(index % IN_FLIGHT, slot_bytes)
            session.send(tag, buffer, done) if send else session.post_receive(tag, buffer, done)

        go = credit_tag(SessionNonce(2), CreditNumber(number))
        began_s = time.perf_counter()
        if send:
            await one(session.post_receive, go)
            await Pump(start, count).finished
        else:
            pump = Pump(start, count)
            await one(session.send, go)
            await pump.finished
        seconds.append(time.perf_counter() - began_s)
    return seconds


async def one(operation: Callable[..., None], tag: int) -> None:
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    operation(tag, np.zeros(1, np.uint8), done.set_result)
    await done


async def side(lanes: str, pipe: Connection, *, prefill: bool) -> None:
    apply_ucx_environment(ucx_environment(lanes))
    transport = UcxTransport()
    if prefill:
        expected = transport.expect(SESSION, lambda reason: None)
        pipe.send(await transport.listen("127.0.0.1", 0))
        session = await expected
    else:
        session = await transport.dial(pipe.recv(), SESSION, lambda reason: None, 10.0)
    first = 0
    for slot_bytes in SLOT_SIZES:
        arena = Arena(IN_FLIGHT, slot_bytes)
        seconds = await rounds(session, arena, slot_bytes, first, send=prefill)
        first += ROUNDS * TRANSFER_BYTES // slot_bytes
        if not prefill:
            best, median = (TRANSFER_BYTES / it / 1e9 for it in (min(seconds[1:]), statistics.median(seconds[1:])))
            report(
                f"lane {session.lane.name:6} slots of {slot_bytes >> 20:2} MiB: best {best:.2f}, median {median:.2f} GB/s"
            )
    pipe.send(None) if not prefill else await asyncio.to_thread(pipe.recv)
    await transport.close()


def run_side(lanes: str, pipe: Connection, prefill: bool) -> None:
    asyncio.run(side(lanes, pipe, prefill=prefill))


def measure_lanes(lanes: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    processes = [spawn.Process(target=run_side, args=(lanes, end, end is ends[0])) for end in ends]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a side ended with {process.exitcode}"


def measure_copies(head_order: str, layer_group: int) -> None:
    layout = KvLayout(layer_group, 8, 128, "bfloat16", 16, head_order, layer_group)  # type: ignore[arg-type]
    blocks = 4 * TRANSFER_BYTES // layout.block_bytes
    inner = (16, 8) if head_order == "NHD" else (8, 16)
    memory = np.ones((1, blocks, layer_group, 2, *inner, layout.head_bytes), np.uint8)
    pool = KvPool(layout, (memory,), np.zeros(blocks, np.uint64))
    order = np.random.default_rng(1).permutation(blocks)[: TRANSFER_BYTES // layout.block_bytes]
    table, arena = TransferBlocks.of(order), Arena(IN_FLIGHT, 4 << 20)
    parcels = cut_parcels(0, len(order) * 16, layout, layout, 4 << 20)
    steps: dict[str, Callable[..., object]] = {
        "gather": lambda parcel, payload: gather_parcel(pool, table, parcel, payload),
        "digest": lambda parcel, payload: payload_digest(1, payload),
        "scatter": lambda parcel, payload: scatter_parcel(pool, table, parcel, payload),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        spent = dict.fromkeys(steps, 0.0)
        for index, parcel in enumerate(parcels):
            payload: Bytes = arena.message(index % IN_FLIGHT, parcel.wire_bytes(layout))[:-TRAILER_BYTES]
            for name, step in steps.items():
                began_s = time.perf_counter()
                step(parcel, payload)
                spent[name] += time.perf_counter() - began_s
        for name, spent_s in spent.items():
            seconds[name].append(spent_s)
    size = sum(parcel.wire_bytes(layout) for parcel in parcels)
    figures = ", ".join(f"{name} {size / statistics.median(it) / 1e9:.1f}" for name, it in seconds.items())
    report(
        f"copies {head_order}, layer group {layer_group:2}: {figures} GB/s (median; digest over a slot still in cache)"
    )


def report(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="*", default=["tcp", "sm,self,tcp"], help="values of UCX_TLS to measure")
    for lanes in parser.parse_args().lanes:
        measure_lanes(lanes)
    for head_order, layer_group in (("NHD", 32), ("NHD", 1), ("HND", 1)):
        measure_copies(head_order, layer_group)


if __name__ == "__main__":
    main()
