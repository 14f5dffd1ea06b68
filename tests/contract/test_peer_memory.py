"""A peer's memory is mapped from the handshake to the session's fence, on transports whose device is a stand-in."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kv_transfer.transport.contact import HANDLE_BYTES
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_environment import ucx_environment

pytestmark = pytest.mark.sockets


class StandIn:
    """As `CudaDevice`, but for the memory, which is the host's."""

    def __init__(self, name: int) -> None:
        self._handles = (bytes([name]) * HANDLE_BYTES, bytes([name + 1]) * HANDLE_BYTES)
        self.mapped: list[tuple[bytes, ...]] = []
        self.closed = 0

    def entering(self) -> tuple[None, None]:
        return None, None

    def allocate(self, size: int, *, mapped_by_peers: bool = True) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def handles(self) -> tuple[bytes, ...]:
        return self._handles

    def map(self, handles: tuple[bytes, ...]) -> StandIn:
        self.mapped.append(handles)
        return self

    def close(self) -> None:
        self.closed += 1


async def test_each_side_maps_what_the_other_exports_until_the_session_is_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ucx_environment("sm,self,tcp").items():
        monkeypatch.setenv(name, value)
    here, there = StandIn(1), StandIn(5)
    decode, prefill = UcxTransport(here), UcxTransport(there)  # type: ignore[arg-type]
    expected = prefill.expect(3, lambda reason: None)
    dialled = await decode.dial(await prefill.listen("127.0.0.1", 0), 3, lambda reason: None, 5.0)
    await expected
    async with asyncio.timeout(10):
        while not (here.mapped and there.mapped):
            await asyncio.sleep(0.001)
    assert here.mapped == [there.handles()]
    assert there.mapped == [here.handles()]
    assert here.closed == there.closed == 0
    await dialled.close()
    async with asyncio.timeout(10):
        while not here.closed:
            await asyncio.sleep(0.001)
    await asyncio.gather(decode.close(), prefill.close())
    assert here.closed == there.closed == 1
