"""The thread behind a UCX worker: what is told of orders, and when there is no compiler for it."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from foundation.errors import SetupError
from kv_transfer.transport import ucx_worker
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.ucx_environment import ucx_environment
from kv_transfer.transport.ucx_worker import CANCELED, MESSAGE_TRUNCATED, OK, UcxEndpoint, UcxWorker

pytestmark = pytest.mark.sockets

TAG = 0xABC
LEAVES_A_MESSAGE = """
import asyncio
import numpy as np
from kv_transfer.transport.ucx_environment import apply_ucx_environment, ucx_environment
from kv_transfer.transport.ucx_worker import UcxWorker

async def main() -> None:
    apply_ucx_environment(ucx_environment("sm,self,tcp"))
    worker = UcxWorker()
    endpoint = await worker.endpoint(worker.address)
    for tag in (1, 2):
        endpoint.send(tag, np.zeros(8, np.uint8), lambda status: None)
    while not await worker.drop_unexpected(2, -1):  # when that has come, the first has come as well
        pass
    await endpoint.destroy()
    await worker.close()

asyncio.run(main())
"""
ENDS_WITHIN = """
#define _GNU_SOURCE
#include <ucp/api/ucp.h>

static ucs_status_ptr_t receive(ucp_worker_h, void *, size_t, ucp_tag_t, ucp_tag_t, const ucp_request_param_t *);
#define ucp_tag_recv_nbx receive
#include "%s"
#undef ucp_tag_recv_nbx

/* What is allocated behind each call lies where an operation was that the call has given back. */
static struct operation *behind, untouched;

static ucs_status_ptr_t receive(
    ucp_worker_h worker, void *buffer, size_t length, ucp_tag_t tag, ucp_tag_t mask, const ucp_request_param_t *param)
{
    if (behind && memcmp(behind, &untouched, sizeof untouched))
        abort();
    ucp_request_param_t within = *param;
    within.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    ucs_status_ptr_t request = ucp_tag_recv_nbx(worker, buffer, length, tag, mask, &within);
    behind = memset(malloc(sizeof untouched), 0, sizeof untouched);
    return request;
}
"""
Pair = tuple[UcxWorker, UcxWorker]


@pytest.fixture
def _lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ucx_environment("sm,self,tcp").items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def pair(_lanes: None) -> AsyncIterator[Pair]:
    workers = UcxWorker(), UcxWorker()
    yield workers
    for worker in workers:
        await worker.close()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


async def ended(endpoint: UcxEndpoint, receives: list[int]) -> list[int]:
    """How that many receives, for which nothing comes, end with their endpoint."""
    told: list[int] = []
    for tag in receives:
        endpoint.receive(tag, np.zeros(8, np.uint8), told.append)
    await endpoint.destroy()
    async with asyncio.timeout(10):
        while len(told) < len(receives):
            await asyncio.sleep(0)
    return told


async def test_more_outcomes_than_are_taken_at_once_are_all_told(pair: Pair) -> None:
    here, there = pair
    endpoint = await here.endpoint(there.address)
    assert await ended(endpoint, list(range(1000))) == [CANCELED] * 1000


async def test_whoever_raises_keeps_nobody_else_from_hearing(pair: Pair) -> None:
    here, there = pair
    endpoint = await here.endpoint(there.address)
    raised = asyncio.Event()

    def fail(status: int) -> None:
        raise RuntimeError(f"on purpose, at {status}")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.set())
    endpoint.receive(TAG, np.zeros(8, np.uint8), fail)
    assert await ended(endpoint, [1, 2, 3]) == [CANCELED] * 3
    assert raised.is_set()


async def test_messages_meet_the_receives_of_their_tag_alone(pair: Pair) -> None:
    here, there = pair
    out, back = await here.endpoint(there.address), await there.endpoint(here.address)
    loop = asyncio.get_running_loop()
    buffers = np.zeros((3, 100_000), np.uint8)
    landed: list[asyncio.Future[int]] = [loop.create_future() for _ in buffers]
    for tag, buffer in enumerate(buffers):
        back.receive(tag, buffer, landed[tag].set_result)
    for tag in (2, 0, 1):
        out.send(tag, np.full(100_000, tag + 1, np.uint8), lambda status: None)
    async with asyncio.timeout(10):
        assert await asyncio.gather(*landed) == [OK] * 3
    assert [set(buffer) for buffer in buffers] == [{1}, {2}, {3}]
    await out.destroy()
    await back.destroy()


@pytest.mark.parametrize("has_come", [False, True])
async def test_an_endpoint_that_nobody_waits_for_any_more_is_destroyed(
    has_come: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    making = asyncio.create_task(here.endpoint(there.address))
    await asyncio.sleep(0)
    tell = here._tell

    def tell_and_cancel(outcomes: deque[tuple[int, int, int]]) -> None:
        tell(outcomes)
        making.cancel()

    if has_come:
        monkeypatch.setattr(here, "_tell", tell_and_cancel)
    else:
        making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    endpoint = await here.endpoint(there.address)  # what comes later is done later
    await endpoint.destroy()
    assert not here._endpoints


async def test_nothing_is_asked_of_an_endpoint_that_is_destroyed(pair: Pair) -> None:
    """Its memory is given back before its last outcome is told."""
    here, there = pair
    endpoint = await here.endpoint(there.address)
    operation = endpoint.receive(TAG, np.zeros(8, np.uint8), lambda status: None)
    destroying = asyncio.create_task(endpoint.destroy())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="destroyed"):
        endpoint.cancel(operation)
    await destroying
    with pytest.raises(AssertionError, match="destroyed"):
        await endpoint.destroy()


async def test_nothing_is_asked_of_a_worker_once_its_closing_has_begun(pair: Pair) -> None:
    here, there = pair
    closing = asyncio.create_task(here.close())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="closed"):
        await here.endpoint(there.address)
    await closing


async def test_what_an_endpoint_says_of_itself_is_given_back_also_when_nobody_waits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    endpoint = await here.endpoint(there.address)
    read: list[str] = []
    taken_text = ucx_worker._taken_text
    monkeypatch.setattr(ucx_worker, "_taken_text", lambda pointer: read.append(taken_text(pointer)))
    describing = asyncio.create_task(endpoint.describe())
    await asyncio.sleep(0)
    describing.cancel()
    await endpoint.destroy()  # what comes later is done later
    assert [text.startswith("#") for text in read] == [True]


@pytest.mark.usefixtures("_lanes")
async def test_a_receive_may_end_within_the_call_that_posts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with UCX of some systems: one that ends so is told once, and nothing of it is touched any more."""
    source = tmp_path / "ucx_worker.c"
    source.write_text(ENDS_WITHIN % ucx_worker.SOURCE)
    monkeypatch.setattr(ucx_worker, "SOURCE", source)
    ucx_worker._libraries.cache_clear()
    worker = UcxWorker()
    ucx_worker._libraries.cache_clear()
    endpoint = await worker.endpoint(worker.address)
    sizes = [0, 8, 5000, 1 << 20] * 20
    outcomes: list[list[int]] = [[] for _ in sizes]
    sent: list[int] = []
    for tag, size in enumerate(sizes):
        endpoint.send(tag, np.ones(size, np.uint8), sent.append)
    endpoint.send(1000, np.zeros(8, np.uint8), sent.append)
    async with asyncio.timeout(10):
        while not await worker.drop_unexpected(1000, -1):  # all others have come before it
            pass
        for tag, told in enumerate(outcomes):
            endpoint.receive(tag, np.zeros(4, np.uint8), told.append)
        while not all(outcomes):
            await asyncio.sleep(0)
    await endpoint.destroy()
    await worker.close()
    assert outcomes == [[OK if size == 0 else MESSAGE_TRUNCATED] for size in sizes]


@pytest.mark.usefixtures("_lanes")
async def test_a_gpu_that_cannot_be_entered_is_an_error() -> None:
    refuse = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda context: 700)
    device = SimpleNamespace(entering=lambda: (ctypes.cast(refuse, ctypes.c_void_p), None))
    with pytest.raises(TransportError, match=r"ucx_unavailable: .*no_device"):
        UcxWorker(device)  # type: ignore[arg-type]


async def test_all_that_an_endpoint_has_open_ends_with_it(pair: Pair) -> None:
    """Short and long, of both kinds, some of them matched."""
    here, there = pair
    out, back = await here.endpoint(there.address), await there.endpoint(here.address)
    told: list[int] = []
    buffers = np.zeros((2, 40, 1 << 20), np.uint8)
    for tag, size in enumerate([0, 1, 5000, 1 << 20] * 10):
        out.send(tag, buffers[0, tag][:size], told.append)
        if tag % 3:
            back.receive(tag, buffers[1, tag][:size], told.append)
        out.receive(1000 + tag, buffers[1, tag][:size], told.append)
    asked = 40 + 26 + 40
    await asyncio.gather(out.destroy(), back.destroy())
    async with asyncio.timeout(10):
        while len(told) < asked:
            await asyncio.sleep(0)
    assert set(told) <= {OK, CANCELED}


async def test_orders_wake_a_thread_that_is_just_falling_asleep(pair: Pair) -> None:
    """One order at a time, each as soon as the last has ended: a wake-up that is lost stands still for ever."""
    here, there = pair
    out, back = await here.endpoint(there.address), await there.endpoint(here.address)
    message = np.zeros(8, np.uint8)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        for tag in range(3000):
            landed: asyncio.Future[int] = loop.create_future()
            sent: asyncio.Future[int] = loop.create_future()
            back.receive(tag, message, landed.set_result)
            if tag % 2:
                await asyncio.sleep(0)
            out.send(tag, message, sent.set_result)
            assert set(await asyncio.gather(landed, sent)) == {OK}
    await out.destroy()
    await back.destroy()


@pytest.mark.usefixtures("_lanes")
async def test_a_closed_worker_has_no_thread() -> None:
    first = UcxWorker()
    await first.close()
    before = threads()
    for _ in range(5):
        worker = UcxWorker()
        await worker.close()
        await worker.close()
    assert threads() <= before


async def test_what_ucx_says_goes_where_our_logs_go() -> None:
    """It says of a message that nobody takes that it was not matched."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEAVES_A_MESSAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, logged = await child.communicate()
    assert b"not matched" in logged
    assert said == b""


async def test_a_lane_that_ucx_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    with pytest.raises(TransportError, match="ucx_unavailable: UCX cannot start with this UCX_TLS: no_device"):
        UcxWorker()


async def test_without_a_compiler_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    ucx_worker._libraries.cache_clear()
    with pytest.raises(SetupError, match=r"transfers need a C compiler .*gcc.*DECANT_CACHE"):
        UcxWorker()
    ucx_worker._libraries.cache_clear()
