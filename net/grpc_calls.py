"""How a dialled stream is ended, so that its connection ends with its channel.

Must not know: what travels on it.
"""

from __future__ import annotations

from typing import Any

import grpc


def end_call(call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Cancel a call, whatever became of it; idempotent.

    grpc.aio (1.85) takes a call for over when one of its writes has failed, and then `cancel` does nothing. But underneath it
    lives on as long as anything that the server said is unread, and keeps its connection open when the channel is closed
    (seen after SIGSTOP and SIGCONT of the client: one socket more on both sides each time). The library has no public way to
    reach it then; `test_grpc_calls` notices when it has one, or has lost this one.
    """
    call.cancel()
    call._cython_call.cancel("over")  # type: ignore[attr-defined]
