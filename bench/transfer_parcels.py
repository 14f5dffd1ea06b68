"""What Python costs for each parcel of a transfer, on the asyncio thread of either side: `python -m bench.transfer_parcels`.

Two processes, real drivers, real gRPC and UCX on one machine. Slots are so small (32 KiB) that bytes cost next to nothing, and
P's KV is all computed. What counts is the CPU time of the thread through which everything of a node passes, so that a busy
machine harms the figure less than it harms the clock; beside it the time of the whole transfer. Medians of many transfers.

With `--beside TREE` another checkout of this project is measured in turn with this one, and ratios are printed. With `--profile
DIR` each side leaves there what cProfile saw on its asyncio thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import uvloop

from bench.transfer_beside_ucx import MASTER, OWNER, D, EmptyDecode, P, ReadyPrefill, new_ticket, no_progress
from bench.transfer_lane import report
from bench.transfer_stages import medians_of_trees, run_pair
from foundation.ids import RequestId, TransferId
from foundation.kv_layout import KvLayout
from foundation.log import configure
from foundation.metrics import NodeMetrics
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import MeteredTransfers, TransferLimits
from kv_transfer.landings import SHARE
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer
from kv_transfer.prefill_driver import SESSIONS_AT_ONCE, PrefillDriver
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

LAYOUT = KvLayout(8, 8, 8, "bfloat16", block_size=16, layer_group=8)
SLOT_BYTES = LAYOUT.token_bytes * LAYOUT.block_size
"""One block a parcel: 32 KiB."""
WARM_UP = 3


def limits(slots: int, shares: int) -> TransferLimits:
    return TransferLimits(slots * shares * SLOT_BYTES, SLOT_BYTES)


def new_pool(parcels: int) -> KvPool:
    shape = (1, 2 * parcels, LAYOUT.layers, 2, LAYOUT.block_size, LAYOUT.kv_heads, LAYOUT.head_bytes)
    return KvPool(LAYOUT, (np.full(shape, 5, np.uint8),), np.full(2 * parcels, OWNER, np.uint64))


async def prefill_side(pipe: Connection, parcels: int, slots: int) -> None:
    """Tells the CPU seconds of its thread as often as D asks, until D says that it was the last time."""
    transport = UcxTransport()
    engine = ReadyPrefill(parcels * LAYOUT.block_size)
    address = await transport.listen("127.0.0.1", 0)
    driver = engine.driver = PrefillDriver(
        P,
        new_pool(parcels),
        limits(slots, SESSIONS_AT_ONCE),
        transport,
        address,
        MASTER.for_node(P.node_id),
        engine,
        no_progress,
        MeteredTransfers(NodeMetrics()),
    )
    server = grpc.aio.server()
    driver.register(server)
    control_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pipe.send((control_address, driver.epoch))
    while await asyncio.to_thread(pipe.recv):
        pipe.send(time.thread_time())
    await driver.close()
    await server.stop(0)
    await transport.close()


async def decode_side(pipe: Connection, parcels: int, slots: int, repeat: int) -> list[dict[str, float]]:
    """Seconds of each transfer but the first few."""
    transport = UcxTransport()
    engine = EmptyDecode(parcels * LAYOUT.block_size)
    observer = MeteredTransfers(NodeMetrics())
    settings = limits(slots, SHARE)
    driver = engine.driver = DecodeDriver(D, new_pool(parcels), settings, transport, engine, no_progress, observer)
    control_address, epoch = await asyncio.to_thread(pipe.recv)

    async def prefill_cpu_s() -> float:
        pipe.send(True)
        return float(await asyncio.to_thread(pipe.recv))

    figures = []
    for number in range(repeat + WARM_UP):
        transfer = TransferId(RequestId(f"r{number}"), 1, 1)
        prompt = tuple(range(parcels * LAYOUT.block_size))
        ticket = new_ticket(transfer.attempt_id, epoch, prompt)
        engine.over = asyncio.get_running_loop().create_future()
        theirs_s = await prefill_cpu_s()
        began_s, ours_s = time.monotonic(), time.thread_time()
        driver.begin(BeginTransfer(transfer, P.node_id, control_address, ticket, prompt, (), b"", 60.0))
        await engine.over
        ours_s, took_s = time.thread_time() - ours_s, time.monotonic() - began_s
        theirs_s = await prefill_cpu_s() - theirs_s
        if number >= WARM_UP:
            figures.append({"P's thread": theirs_s, "D's thread": ours_s, "Ask to commit": took_s})
    pipe.send(False)
    await driver.close()
    await transport.close()
    return figures


def run_side(pipe: Connection, arguments: argparse.Namespace, *, prefill: bool) -> None:
    """The process of one side. D prints the figures of all transfers as one line of JSON."""
    os.sched_setaffinity(0, {arguments.cores[0 if prefill else 1]})
    apply_ucx_environment(ucx_environment(arguments.lanes))
    configure("warning", "json", role="bench")
    profile = cProfile.Profile(time.thread_time) if arguments.profile else None
    if profile is not None:
        profile.enable()
    if prefill:
        uvloop.run(prefill_side(pipe, arguments.parcels, arguments.slots))
    else:
        report(json.dumps(uvloop.run(decode_side(pipe, arguments.parcels, arguments.slots, arguments.transfers))))
    if profile is not None:
        profile.disable()
        profile.dump_stats(arguments.profile / f"{'prefill' if prefill else 'decode'}.profile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="sm,self,tcp", help="value of UCX_TLS")
    parser.add_argument("--parcels", type=int, default=256, help="of each transfer")
    parser.add_argument("--slots", type=int, default=8, help="that a session has on either side")
    parser.add_argument("--transfers", type=int, default=10, help="in each round")
    parser.add_argument("--rounds", type=int, default=3, help="each with processes of its own")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="P's and D's")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--profile", type=Path, help="where each side leaves <side>.profile")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        run_pair(run_side, arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    us_a_parcel = 1e6 / arguments.parcels
    for name, here_s, there_s in medians_of_trees(__file__, arguments.beside, arguments.rounds):
        beside = f"   there {us_a_parcel * there_s:6.1f} us   ratio {here_s / there_s:.2f}" if there_s else ""
        report(f"{name:14} {us_a_parcel * here_s:6.1f} us a parcel{beside}")


if __name__ == "__main__":
    main()
