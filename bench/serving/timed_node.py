"""A node that notes when things happen, for the bench: `python -m bench.serving.timed_node EVENTS prefill|decode [option ...]`.

It is the node that `decant prefill` and `decant decode` run, with three of its own classes replaced by subclasses that write a
line and then do what they always do. Lines are JSON; times are CLOCK_MONOTONIC, which all processes of one machine share.

    {"at": s, "what": "computed", "transfer": id, "positions": n}   P's asyncio thread knows that these positions are computed
    {"at": s, "what": "reserved", "transfer": id, "positions": n}   D has its blocks: credits leave in the same turn
    {"at": s, "what": "committed", "transfer": id, "bytes": n}      D has verified and scattered everything
    {"at": s, "what": "step", "seconds": s, "running": n}           one turn of the engine, by its end
    {"at": s, "what": "idle", ...}                                  answer to SIGUSR2: share of two seconds without GPU work
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import decode_node.main as decode_main
import prefill_node.main as prefill_main
from decant import processes
from decode_node.service import DecodeService
from engine.loop import Engine
from engine.port import EngineEvent
from foundation.ids import BlockId, TransferId
from kv_transfer.decode_driver import DecodeDriver
from kv_transfer.driver import MeteredTransfers
from kv_transfer.port import TransferAccount

PROFILED_S = 2.0


class Notes:
    """Lines in a file, written by several threads."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, what: str, **facts: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "what": what, **facts})
        with self._lock:
            self._file.write(line + "\n")


def watch(notes: Notes) -> None:
    """Replace the classes that both mains take from their modules."""

    class TimedTransfers(MeteredTransfers):
        def computed(self, transfer: TransferId, positions: int) -> None:
            notes.write("computed", transfer=str(transfer), positions=positions)
            super().computed(transfer, positions)

    class TimedDriver(DecodeDriver):
        def reserved(
            self, transfer: TransferId, block_ids: Sequence[BlockId], from_position: int, end_position: int
        ) -> None:
            notes.write("reserved", transfer=str(transfer), positions=end_position - from_position)
            super().reserved(transfer, block_ids, from_position, end_position)

    class TimedService(DecodeService):
        def committed(self, transfer: TransferId, account: TransferAccount) -> None:
            notes.write("committed", transfer=str(transfer), bytes=account.payload_bytes, lane=account.lane)
            super().committed(transfer, account)

    for module, name, timed in (
        (prefill_main, "MeteredTransfers", TimedTransfers),
        (decode_main, "MeteredTransfers", TimedTransfers),
        (decode_main, "DecodeDriver", TimedDriver),
        (decode_main, "DecodeService", TimedService),
    ):
        assert hasattr(module, name), f"{module.__name__} has no {name}: nothing would be noted"
        setattr(module, name, timed)
    original = Engine.step

    def step(engine: Engine, answered: Callable[[list[EngineEvent]], None] | None = None) -> list[EngineEvent]:
        begun = time.monotonic()
        events = original(engine, answered)
        notes.write("step", seconds=time.monotonic() - begun, running=engine.status().running)
        return events

    Engine.step = step  # type: ignore[method-assign, assignment]


def idle_share() -> dict[str, float]:
    """Of PROFILED_S seconds: the share in which no kernel and no copy ran, all streams together. No GPU: nothing."""
    import torch

    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        time.sleep(PROFILED_S)  # the time that is looked at
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    if not spans:
        return {"idle_share": 1.0, "wall_s": PROFILED_S}
    busy_us, end = 0.0, spans[0][0]
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    wall_us = end - spans[0][0]
    return {"idle_share": 1 - busy_us / wall_us, "wall_s": wall_us / 1e6, "kernels": len(spans)}


def main() -> int:
    events, role, *arguments = sys.argv[1:]
    with open(events, "w", buffering=1) as file:
        notes = Notes(file)

        def profile(number: int, frame: object) -> None:
            threading.Thread(target=lambda: notes.write("idle", **idle_share()), daemon=True).start()

        signal.signal(signal.SIGUSR2, profile)
        watch(notes)
        run = {"prefill": processes.prefill, "decode": processes.decode}[role]
        return run(arguments, os.environ)


if __name__ == "__main__":
    sys.exit(main())
