"""UCX's progress thread beside a GPU, which is woken and put to rest while messages pass."""

from __future__ import annotations

import asyncio
import os
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest

from kv_transfer.transport import ucx_worker
from kv_transfer.transport.cuda_memory import CudaDevice
from kv_transfer.transport.ucx_environment import ucx_environment
from kv_transfer.transport.ucx_worker import UcxWorker

DEADLINE_S = 20.0
ROUNDS = 60
AT_ONCE = 4


class FakeDevice:
    """Messages lie in host memory; the worker takes them for a GPU's."""

    def use_in_this_thread(self) -> None:
        pass


@pytest.mark.sockets
async def test_messages_pass_whole_while_progress_wakes_and_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_worker, "AWAKE_S", 0.002)
    with patch.dict(os.environ, ucx_environment("tcp,posix,self")):
        near, far = (UcxWorker(cast(CudaDevice, FakeDevice())) for _ in range(2))
    there, back = await asyncio.gather(near.endpoint(far.address), far.endpoint(near.address))
    sent = np.random.default_rng(7).integers(0, 256, 1 << 18, dtype=np.uint8)
    for first in range(0, ROUNDS * AT_ONCE, AT_ONCE):
        rooms = [np.zeros_like(sent) for _ in range(AT_ONCE)]
        requests = []
        for tag, room in enumerate(rooms, first):
            far.stay_awake()
            requests.append(back.tag_receive(tag, room))
        for tag in range(first, first + AT_ONCE):
            near.stay_awake()
            requests.append(there.tag_send(tag, sent))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(request.future for request in requests))
        assert all((room == sent).all() for room in rooms)
        if first % 3 == 0:
            await asyncio.sleep(2 * ucx_worker.AWAKE_S)  # so that they rest in between
    await near.run(there.destroy)
    await far.run(back.destroy)
    await near.close()
    await far.close()
