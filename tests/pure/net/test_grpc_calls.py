"""Ending a call reaches below a wrapper that takes it for over, by a member of grpc.aio that is not public.

There is no public way (1.85: `cancel` asks `done` first). Where a later version has one, or lost this member, this test says so.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from net.grpc_calls import end_call


async def test_a_call_whose_write_has_failed_is_ended_below_its_wrapper_and_twice_does_no_harm() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call: Any = channel.stream_stream("/nobody/Hears")()
        call._cython_call.set_internal_error("a write failed")  # what the library does then
        assert call.done()
        assert not call.cancel(), "the public way works by now: net/grpc_calls.py is needed no more"
        assert not call._cython_call.is_locally_cancelled()
        for _ in range(2):
            end_call(call)
            assert call._cython_call.is_locally_cancelled()
