"""What KV that lands or leaves costs the engine's own steps, inside one process: the GPU's price alone, without a transport.

A thread does what a node's threads of C do, on a stream of the same low priority: it has a slot filled (from pinned host memory,
as a network card would write it, or read from another GPU, as UCX does on one host) and scatters it; or it gathers into slots. It
keeps to the given rate. It is a thread of Python, so it wants the interpreter too, which a node's do not.

Must not know: sessions, sockets.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bench.gpu.measure import DEVICE, captured
from bench.gpu.parts import BLOCK_SIZE, Figures, unequal
from bench.gpu.shape import HEAD_DIM, KV_BYTES_A_TOKEN, KV_HEADS, LAYERS
from bench.gpu.steps import TIMED_STEPS, WARM_STEPS, Loop, new_loop, prefill, start_decodes
from engine.build_device import DeviceEngineParts
from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.kv_layout import HeadOrder, KvLayout
from kv_transfer.device_copy import PROGRAMS, DeviceCopier, DevicePool
from kv_transfer.device_launches import AT_ONCE
from kv_transfer.device_staging import COPY_PRIORITY
from kv_transfer.plan.parcels import ParcelName, cut_parcels
from kv_transfer.transport.cuda_memory import CudaDevice

SLOT_BYTES = 64 << 20
TOKENS = 2048
NEXT_TO_NOTHING = ParcelName(0, 1, 0, 1, 0, KV_HEADS)
"""4 KiB: a copy of it costs the host what any copy costs, and the GPU a few microseconds."""

Work = Callable[[int], int]
"""Launches copies, given how many times it was called before; the bytes they stand for."""


class Copying:
    """Parcels of one prompt of TOKENS tokens, over and over, into or out of a pool beside the engine's. What lands comes from
    host memory, or from the GPU that is the `source`."""

    def __init__(
        self,
        order: HeadOrder,
        group: int,
        slot_bytes: int = SLOT_BYTES,
        programs: int = PROGRAMS,
        source: torch.device | None = None,
    ) -> None:
        layout = KvLayout(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, order, group)
        count = TOKENS // BLOCK_SIZE
        storage = DeviceKvStorage(layout, 2 * count, DEVICE)
        storage.memory.normal_()
        self._copier = DeviceCopier(DevicePool(layout, storage.memory, storage.device_owner_words), programs)
        self._copier.compile(KV_HEADS)
        self._parcels = cut_parcels(0, TOKENS, layout, layout, slot_bytes)
        self._sizes = [parcel.wire_bytes(layout) for parcel in self._parcels]
        self._least_bytes = NEXT_TO_NOTHING.wire_bytes(layout)
        order_of_blocks = np.random.default_rng(5).permutation(2 * count)[:count].astype(np.int32)
        self._blocks = torch.from_numpy(order_of_blocks).to(DEVICE)
        self._owners = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        self._seed = torch.tensor([77], device=DEVICE)
        self._slots = torch.empty(AT_ONCE, slot_bytes + 4096, dtype=torch.uint8, device=DEVICE)
        self._outcomes = torch.zeros(AT_ONCE, 2, dtype=torch.int64, device=DEVICE)
        self._arriving = _readable(slot_bytes, source)
        self._driver = CudaDevice(DEVICE.index)
        self._stop = threading.Event()
        self.copied_bytes = 0

    def run(self, gb_s: float, work: Work) -> None:
        torch.cuda.set_device(DEVICE)
        stream = torch.cuda.Stream(DEVICE, priority=COPY_PRIORITY)  # type: ignore[no-untyped-call]
        ended = [torch.cuda.Event() for _ in range(AT_ONCE)]  # type: ignore[no-untyped-call]
        begun, number, before = time.perf_counter(), 0, self.copied_bytes
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                wait_s = begun + (self.copied_bytes - before) / (gb_s * 1e9) - time.perf_counter()
                if wait_s > 0:
                    time.sleep(wait_s)
                ended[number % AT_ONCE].synchronize()
                self.copied_bytes += work(number)
                ended[number % AT_ONCE].record()
                number += 1
        stream.synchronize()

    def land(self, number: int) -> int:
        """A parcel arrives in a slot and is scattered."""
        place = number % len(self._parcels)
        self._arrive(number, self._sizes[place])
        self._scatter(number, self._parcels[place], self._sizes[place])
        return self._sizes[place]

    def leave(self, number: int) -> int:
        """A parcel is gathered into a slot."""
        place = number % len(self._parcels)
        parcel, size = self._parcels[place], self._sizes[place]
        part, slot = _blocks_of(parcel), number % AT_ONCE
        owners, message = self._owners[part], self._slots[slot][: size + 8]
        self._copier.gather(parcel, self._blocks[part], owners, self._seed, message, self._outcomes[slot])
        return size

    def land_for_the_host(self, number: int) -> int:
        """All that `land` asks of the host, with next to nothing for the GPU; it counts as if the parcel had landed."""
        self._arrive(number, self._least_bytes)
        self._scatter(number, NEXT_TO_NOTHING, self._least_bytes)
        return self._sizes[number % len(self._parcels)]

    def land_for_the_gpu(self, *, scattered: bool) -> Work:
        """All that `land` asks of the GPU for a whole prompt, as one graph: one launch instead of two a parcel. Without
        `scattered` the parcels only arrive."""

        def prompt() -> None:
            for place, (parcel, size) in enumerate(zip(self._parcels, self._sizes, strict=True)):
                self._arrive(place, size)
                if scattered:
                    self._scatter(place, parcel, size)

        replay, prompt_bytes = captured(prompt), sum(self._sizes)

        def work(number: int) -> int:
            replay()
            return prompt_bytes

        return work

    def _arrive(self, number: int, size: int) -> None:
        target, source = (ctypes.c_uint64(end.data_ptr()) for end in (self._slots[number % AT_ONCE], self._arriving))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._driver.call("cuMemcpyAsync", target, source, ctypes.c_size_t(size), stream)

    def _scatter(self, number: int, parcel: ParcelName, size: int) -> None:
        slot = number % AT_ONCE
        message = self._slots[slot][: size + 8]
        self._copier.scatter(parcel, self._blocks[_blocks_of(parcel)], self._seed, message, self._outcomes[slot])

    @contextmanager
    def beside(self, gb_s: float, work: Work) -> Iterator[None]:
        self._stop.clear()
        before = self.copied_bytes
        thread = threading.Thread(target=self.run, args=(gb_s, work), name="copying")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        assert self.copied_bytes > before, "nothing was copied"


def _readable(size: int, source: torch.device | None) -> torch.Tensor:
    """Bytes that DEVICE can read where they are: in pinned memory, or on another GPU."""
    if source is None:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # This way round torch lets DEVICE into the other's memory.
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE).to(source)


def _blocks_of(parcel: ParcelName) -> slice:
    return slice(parcel.first_position // BLOCK_SIZE, -(-parcel.end_position // BLOCK_SIZE))


def decode_beside_landing(parts: DeviceEngineParts, copying: Copying, rows: int, mean: int, gb_s: float) -> Figures:
    """Steps alone, then with KV landing; milliseconds, the rate that was reached, and what the quantiles grew by."""
    alone = decode_seconds(parts, rows, mean)
    with copying.beside(gb_s, copying.land):
        begun, before = time.perf_counter(), copying.copied_bytes
        beside = decode_seconds(parts, rows, mean)
        rate = (copying.copied_bytes - before) / (time.perf_counter() - begun)
    figures: Figures = {"landed_gb_s": rate / 1e9}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        first, second = (sorted(seconds)[int(share * len(seconds))] for seconds in (alone, beside))
        figures |= {f"alone_{name}_ms": first * 1e3, f"beside_{name}_ms": second * 1e3, name: second / first - 1}
    return figures


def decode_seconds(
    parts: DeviceEngineParts, rows: int, mean: int, warm: int = WARM_STEPS, timed: int = TIMED_STEPS
) -> list[float]:
    """Of each timed step of a new batch; the mean context is reached in the middle of them."""
    with constant_batch(parts, rows, mean, warm, timed) as loop:
        seconds = []
        for _ in range(timed):
            begun = time.perf_counter()
            loop.engine.step()
            seconds.append(time.perf_counter() - begun)
    return seconds


@contextmanager
def constant_batch(parts: DeviceEngineParts, rows: int, mean: int, warm: int, timed: int) -> Iterator[Loop]:
    """A warm batch that decodes, for `timed` steps."""
    loop = new_loop(parts)
    start_decodes(loop, unequal(rows, mean) - min(warm + timed // 2, mean - 8), 0.0)
    for _ in range(warm):
        loop.engine.step()
    torch.cuda.synchronize()
    yield loop
    assert loop.engine.status().running == rows, "the batch was not constant"
    loop.engine.fail_all("done")
    torch.cuda.synchronize()


def prefill_beside_gathers(parts: DeviceEngineParts, order: HeadOrder, group: int) -> Figures:
    """A prompt's time alone, and while the KV of another is gathered at the rate at which prompts are computed."""
    alone_s = _prefill_s(lambda: prefill(parts, TOKENS))
    copying = Copying(order, group)
    rate_gb_s = TOKENS * KV_BYTES_A_TOKEN / alone_s / 1e9
    with copying.beside(rate_gb_s, copying.leave):
        beside_s = _prefill_s(lambda: prefill(parts, TOKENS))
    return {
        "gathered_gb_s": rate_gb_s,
        "alone_ms": alone_s * 1e3,
        "beside_ms": beside_s * 1e3,
        "price": beside_s / alone_s - 1,
    }


def _prefill_s(run: Callable[[], Figures]) -> float:
    return statistics.median(run()["ms"] for _ in range(2)) / 1e3
