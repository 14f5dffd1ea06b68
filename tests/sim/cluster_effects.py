"""Effects that fail: the n-th of a kind on a node, once or from then on until told otherwise.

Kinds: `gather` (the source is not this transfer's any more), `scatter` (the digest does not match), `post` (a receive is
refused), `send` (refused before a byte has left), `deliver` (fails under way: the endpoint is broken).

Must not know: who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from cluster_clock import Process, VirtualLoop

from kv_transfer import staging
from kv_transfer.pool_copy import KvPool

Kind = Literal["gather", "scatter", "post", "send", "deliver"]
KINDS: tuple[Kind, ...] = ("gather", "scatter", "post", "send", "deliver")


class Effects:
    """`failed` counts what was made to fail."""

    def __init__(self) -> None:
        self.failed = 0
        self._planned: dict[Kind, tuple[int, bool]] = {}

    def fail(self, kind: Kind, after: int, lasting: bool) -> None:
        """The one that follows `after` others fails; and so do all later ones, if `lasting`."""
        self._planned[kind] = (after, lasting)

    def heal(self) -> None:
        self._planned.clear()

    def fails(self, kind: Kind) -> bool:
        """Whether this one fails. Asked once for each."""
        if kind not in self._planned:
            return False
        after, lasting = self._planned[kind]
        if after > 0:
            self._planned[kind] = (after - 1, lasting)
            return False
        if not lasting:
            del self._planned[kind]
        self.failed += 1
        return True


class SimulatedCopier:
    """Stands in for `staging.Copier`: the same verified copies, one after the other, each at a time of its own.

    `check_scatter(job)` looks at the blocks before they are written.
    """

    def __init__(
        self,
        pool: KvPool,
        loop: VirtualLoop,
        process: Process,
        effects: Effects,
        copy_s: Callable[[], float],
        check_scatter: Callable[[staging.Scatter], None],
    ) -> None:
        self.failure = loop.create_future()
        self._pool = pool
        self._loop = loop
        self._process = process
        self._effects = effects
        self._copy_s = copy_s
        self._check_scatter = check_scatter
        self._free_s = 0.0

    def gather(self, job: staging.Gather, done: Callable[[staging.Gathered], None]) -> None:
        self._later(lambda: done(self._gather(job)))

    def scatter(self, job: staging.Scatter, done: Callable[[staging.Scattered | staging.DigestMismatch], None]) -> None:
        self._later(lambda: done(self._scatter(job)))

    async def close(self) -> None:
        self.failure.cancel()

    def _later(self, work: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self._loop.now_s) + self._copy_s()
        self._loop.call_later(self._free_s - self._loop.now_s, work, context=self._process.context.copy())

    def _gather(self, job: staging.Gather) -> staging.Gathered:
        gathered = staging.gather(self._pool, job)
        if self._effects.fails("gather"):
            job.message[-8:] ^= np.uint8(0xFF)
            return staging.Gathered(gathered.digest, intact=False)
        return gathered

    def _scatter(self, job: staging.Scatter) -> staging.Scattered | staging.DigestMismatch:
        if self._effects.fails("scatter"):
            job.message[0] ^= np.uint8(0x10)
        self._check_scatter(job)
        return staging.scatter(self._pool, job)
