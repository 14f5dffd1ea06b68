"""Where the time of one transfer goes, from D's Ask to its commit: `python -m bench.transfer_stages`, one line a stage.

Two processes, each on a core of its own, real drivers, real gRPC and UCX on one machine; P's KV is all computed and engines
answer at once, so that only the hand-over takes time: 512 tokens of SmolLM2-135M in float32 (22.5 MiB) unless told otherwise.
Transfers go one by one with a pause between them, as a request finds an idle pair. Stages are medians; those of one transfer
follow one another. Beside them: what the copies took on the copying threads, digests included, and the CPU time of each process.

With `--beside TREE` another checkout of this project is measured in turn with this one, and each stage's ratio is printed: only
that says something on a machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from bench.transfer_beside_ucx import MASTER, OWNER, D, P, new_ticket, no_progress, strewn_blocks
from bench.transfer_lane import report
from foundation.ids import BlockId, NodeId, RequestId, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer import staging
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import TransferLimits
from kv_transfer.pool_copy import KvPool
from kv_transfer.port import BeginTransfer, PrefillRequest, SettledToken, TransferAccount
from kv_transfer.prefill_driver import PrefillDriver
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment

LAYOUT = KvLayout(30, 3, 64, "float32", block_size=16, head_order="HND", layer_group=30)
STAGING_BYTES = 512 << 20
PAUSE_S = 0.02
"""Between transfers: every thread sleeps again."""

At = dict[str, list[float]]
"""When each thing happened, in its order; CLOCK_MONOTONIC, which all processes of a machine share."""

STAGES: Sequence[tuple[str, tuple[str, int], tuple[str, int]]] = (
    ("Ask reaches P's node", ("begun", 0), ("asked", 0)),
    ("Offer reaches D's node", ("asked", 0), ("offered", 0)),
    ("Credits start the first gather", ("offered", 0), ("gather", 0)),
    ("first gather, digest included", ("gather", 0), ("gather over", 0)),
    ("P's loop knows", ("gather over", 0), ("gathered", 0)),
    ("first message lands, D's loop knows", ("gathered", 0), ("landed", 0)),
    ("all others land", ("landed", 0), ("landed", -1)),
    ("last scatter over, digest included", ("landed", -1), ("scatter over", -1)),
    ("D commits", ("scatter over", -1), ("committed", 0)),
    ("whole", ("begun", 0), ("committed", 0)),
)


class Notes:
    """When things happened in this process; also a `TransferObserver`, which hears of parcels on the asyncio thread."""

    def __init__(self) -> None:
        self.at: At = defaultdict(list)
        self._cpu_s = time.process_time()
        for name in ("gather", "scatter"):
            setattr(staging, name, self._timed(name, getattr(staging, name)))

    def note(self, what: str) -> None:
        self.at[what].append(time.monotonic())

    def take(self) -> tuple[At, float]:
        """What was noted, and the CPU seconds of all threads, since the last time."""
        at, self.at = self.at, defaultdict(list)
        before, self._cpu_s = self._cpu_s, time.process_time()
        return dict(at), self._cpu_s - before

    def _timed(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.note(name)
            result = copy(*arguments)
            self.note(f"{name} over")
            return result

        return timed

    def parcel(self, stage: str, transfer: TransferId, parcel_index: int, payload_bytes: int) -> None:
        self.note(stage)

    def computed(self, transfer: TransferId, positions: int) -> None: ...

    def early(self, transfer: TransferId, parcel_index: int) -> None: ...
    def lane(self, peer: NodeId, lane: str, gigabytes_per_second: float) -> None: ...
    def dropped(self, peer: NodeId, reason: str) -> None: ...
    def slots(self, **states: int) -> None: ...


def new_pool(blocks: int) -> KvPool:
    shape = (1, blocks, LAYOUT.layers, 2, LAYOUT.kv_heads, LAYOUT.block_size, LAYOUT.head_bytes)
    return KvPool(LAYOUT, (np.full(shape, 5, np.uint8),), np.full(blocks, OWNER, np.uint64))


class ReadyPrefill:
    """P's engine: everything is computed before anybody asks, in blocks strewn over its pool; D draws the first token."""

    def __init__(self, notes: Notes, positions: int) -> None:
        self.driver: PrefillDriver | None = None
        self._notes, self._positions = notes, positions
        self._blocks = strewn_blocks(1, positions // LAYOUT.block_size)

    def prefill(self, request: PrefillRequest) -> None:
        assert self.driver is not None
        self._notes.note("asked")
        owners = [OWNER] * len(self._blocks)
        self.driver.reserved(request.transfer, self._blocks, owners, self._positions, self._positions)
        self.driver.first_token(request.transfer, None)

    def released(self, transfer: TransferId, reason: str) -> None: ...


class EmptyDecode:
    """D's engine: it has room for everything."""

    def __init__(self, notes: Notes, positions: int) -> None:
        self.driver: DecodeDriver | None = None
        self._notes = notes
        self._blocks: list[BlockId] = strewn_blocks(2, positions // LAYOUT.block_size)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def reserve(self, transfer: TransferId, end_position: int) -> None:
        assert self.driver is not None
        self._notes.note("offered")
        self.driver.reserved(transfer, self._blocks, 0, end_position)

    def first_token(self, transfer: TransferId, token: SettledToken | None) -> None: ...

    def committed(self, transfer: TransferId, account: TransferAccount) -> None:
        self._notes.note("committed")
        self.over.set_result(None)

    def ended(self, transfer: TransferId, reason: str, account: TransferAccount) -> None:
        self.over.set_exception(RuntimeError(f"{transfer} ended: {reason}"))


def limits(slot_bytes: int) -> TransferLimits:
    return TransferLimits(STAGING_BYTES, slot_bytes)


async def prefill_side(pipe: Connection, positions: int, slot_bytes: int) -> None:
    """Tells what it has noted as often as D asks, until D says that it was the last time."""
    notes, transport, pool = Notes(), UcxTransport(), new_pool(2 * positions // LAYOUT.block_size)
    engine = ReadyPrefill(notes, positions)
    address = await transport.listen("127.0.0.1", 0)
    keys = MASTER.for_node(P.node_id)
    driver = engine.driver = PrefillDriver(
        P, pool, limits(slot_bytes), transport, address, keys, engine, no_progress, notes
    )
    server = grpc.aio.server()
    driver.register(server)
    control_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pipe.send((control_address, driver.epoch))
    while await asyncio.to_thread(pipe.recv):
        pipe.send(notes.take())
    await driver.close()
    await server.stop(0)
    await transport.close()


async def decode_side(pipe: Connection, positions: int, slot_bytes: int, repeat: int) -> list[dict[str, float]]:
    """Seconds by stage and step, of each transfer but the first few."""
    notes, transport = Notes(), UcxTransport()
    engine = EmptyDecode(notes, positions)
    pool = new_pool(2 * positions // LAYOUT.block_size)
    driver = engine.driver = DecodeDriver(D, pool, limits(slot_bytes), transport, engine, no_progress, notes)
    control_address, epoch = await asyncio.to_thread(pipe.recv)
    figures = []
    for number in range(repeat + 3):
        transfer = TransferId(RequestId(f"r{number}"), 1, 1)
        prompt = tuple(range(positions))
        ticket = new_ticket(transfer.attempt_id, epoch, prompt)
        engine.over = asyncio.get_running_loop().create_future()
        await asyncio.sleep(PAUSE_S)
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        notes.take()
        notes.note("begun")
        driver.begin(BeginTransfer(transfer, P.node_id, control_address, ticket, prompt, (), b"", 60.0))
        await engine.over
        ours, decode_cpu_s = notes.take()
        pipe.send(True)
        theirs, prefill_cpu_s = await asyncio.to_thread(pipe.recv)
        if number >= 3:
            cpu_s = {"CPU time of P": prefill_cpu_s, "CPU time of D": decode_cpu_s}
            figures.append(_seconds(ours | theirs) | cpu_s)
    pipe.send(False)
    await driver.close()
    await transport.close()
    return figures


def _seconds(at: At) -> dict[str, float]:
    stages = {name: at[end][last] - at[begin][first] for name, (begin, first), (end, last) in STAGES}
    for step in ("gather", "scatter"):
        stages[f"all {step}s' own time"] = sum(at[f"{step} over"]) - sum(at[step])
    return stages | {"first gather to last": at["gather over"][-1] - at["gather"][0]}


def run_side(pipe: Connection, arguments: argparse.Namespace, *, prefill: bool) -> None:
    """The process of one side. D prints the figures of all transfers as one line of JSON."""
    os.sched_setaffinity(0, {arguments.cores[0 if prefill else 1]})
    apply_ucx_environment(ucx_environment(arguments.lanes))
    slot_bytes = arguments.slot_mib << 20
    if prefill:
        uvloop.run(prefill_side(pipe, arguments.positions, slot_bytes))
    else:
        report(json.dumps(uvloop.run(decode_side(pipe, arguments.positions, slot_bytes, arguments.transfers))))


def run_pair(run_side: Callable[..., None], arguments: argparse.Namespace) -> None:
    """`run_side(pipe, arguments, prefill=...)` for each side, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    processes = [spawn.Process(target=partial(run_side, prefill=end is ends[0]), args=(end, arguments)) for end in ends]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a side ended with {process.exitcode}"


def measure_tree(script: str, tree: Path) -> list[dict[str, float]]:
    """In a process of its own, with the benchmarks as they are here and all else as it is in `tree`."""
    command = [sys.executable, "-P", script, *sys.argv[1:], "--here"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench").symlink_to(Path(__file__).parent)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{tree}"}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(ran.stdout.splitlines()[-1]))


def medians_of_trees(script: str, beside: Path | None, rounds: int) -> Iterator[tuple[str, float, float | None]]:
    """Each figure of `script` in this checkout and in the one beside it, measured in turn."""
    trees = [Path(__file__).parent.parent, *([beside] if beside else ())]
    found: list[list[dict[str, float]]] = [[] for _ in trees]
    for _ in range(rounds):
        for tree, figures in zip(trees, found, strict=True):
            figures.extend(measure_tree(script, tree))
    for name in found[0][0]:
        here, *there = (statistics.median(figures[name] for figures in those) for those in found)
        yield name, here, there[0] if there else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="sm,self,tcp", help="value of UCX_TLS")
    parser.add_argument("--positions", type=int, default=512, help="tokens of each transfer, a multiple of 16")
    parser.add_argument("--slot-mib", type=int, default=4)
    parser.add_argument("--transfers", type=int, default=20, help="in each round")
    parser.add_argument("--rounds", type=int, default=3, help="each with processes of its own")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="P's and D's")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        run_pair(run_side, arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    for name, here_s, there_s in medians_of_trees(__file__, arguments.beside, arguments.rounds):
        beside = f"   there {1e3 * there_s:6.2f} ms   ratio {here_s / there_s:.2f}" if there_s else ""
        report(f"{name:38} {1e3 * here_s:6.2f} ms{beside}")


if __name__ == "__main__":
    main()
