"""Nodes under one router, as the tests of prefill and decode share them."""

from __future__ import annotations

from decant_proto.v1 import types_pb2
from pd_nodes import Metrics, NodeProcess
from pd_router_client import Answer, RouterClient, new_request_id, prefill_choice

from foundation.keys import MasterKeys

BLOCKS = 256
SMALL = (
    f"--num-gpu-blocks-override={BLOCKS}",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",
    "--slot-bytes=4KiB",
    "--staging-bytes=512KiB",
)
PATIENT = "--silence-limit-s=10"
"""Where no silence is tested, a node that is kept waiting for a moment is no fault."""


class Pair:
    """Decode nodes and a prefill node under one router."""

    def __init__(self, keys: MasterKeys, nodes: dict[str, NodeProcess], routers: dict[str, RouterClient]) -> None:
        self.keys = keys
        self.nodes = nodes
        self.routers = routers

    def submit(
        self,
        prompt: list[int],
        sampling: types_pb2.SamplingParameters,
        *,
        decode: str = "d",
        prefill: tuple[str, ...] = ("p",),
        settled: list[int] | None = None,
        request_id: str | None = None,
    ) -> Answer:
        request_id = request_id or new_request_id()
        router = self.routers[decode]
        choices = [
            prefill_choice(self.keys, router, self.routers[name], request_id, prompt, settled or []) for name in prefill
        ]
        return router.submit(prompt, sampling, settled=settled or [], choices=choices, request_id=request_id)

    async def metrics(self, name: str) -> Metrics:
        return await self.nodes[name].metrics()
