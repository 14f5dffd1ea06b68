"""Captured graphs of a decoder: whole decode steps by batch size, and the stretches between attentions by token count.

All graphs share one memory pool: their steps run one after another on one stream, and whatever one leaves (logits) is read before
the next is replayed. Largest sizes are captured first, so that smaller ones fit into the memory they left.

Must not know: plans, how a size is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.decode_plan import DecodePlan, DecodeShape
from engine.attention.invariant import DeviceAttention
from engine.graphs.buffers import StepBuffers
from engine.model.device_decoder import Activations, DeviceDecoder, Tokens


@dataclass(frozen=True, slots=True)
class FullGraph:
    """A whole forward of decodes whose attention plan has this shape. A replay is right for an equal one only."""

    shape: DecodeShape
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self, plan: DecodePlan) -> torch.Tensor:
        assert plan.shape == self.shape, f"captured for {self.shape}, not {plan.shape}"
        self.graph.replay()
        return self.logits


@dataclass(frozen=True, slots=True)
class PiecewiseGraphs:
    """All stretches of `tokens` tokens but the last, which depends on which tokens draw."""

    tokens: int
    state: Activations
    graphs: list[torch.cuda.CUDAGraph]
    """Stretch i ends with layer i's q, k, v."""


class GraphCapture:
    """`stream` is the one that steps run on."""

    def __init__(
        self, decoder: DeviceDecoder, attention: DeviceAttention, buffers: StepBuffers, stream: torch.cuda.Stream
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._buffers = buffers
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def full(self, plan: DecodePlan) -> FullGraph:
        """The step that the plan belongs to has been staged."""
        logits: list[torch.Tensor] = []

        def forward() -> None:
            logits[:] = [decode_forward(self._decoder, self._attention, self._buffers, plan)]

        graph = self._capture(forward)
        return FullGraph(plan.shape, graph, logits[0])

    def piecewise(self, tokens: int) -> PiecewiseGraphs:
        """The buffers hold `tokens` valid tokens."""
        state, staged = self._decoder.activations(tokens), self._buffers.tokens(tokens)
        stretches: list[Callable[[], None]] = [
            lambda: self._decoder.open(staged, state),
            *(_between(self._decoder, layer, staged, state) for layer in range(self._decoder.layers - 1)),
        ]
        return PiecewiseGraphs(tokens, state, [self._capture(stretch) for stretch in stretches])

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and lets libraries allocate, which a capture may not
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph


def _between(decoder: DeviceDecoder, layer: int, staged: Tokens, state: Activations) -> Callable[[], None]:
    return lambda: decoder.between(layer, staged, state)


def decode_forward(
    decoder: DeviceDecoder, attention: DeviceAttention, buffers: StepBuffers, plan: DecodePlan
) -> torch.Tensor:
    """Logits of all staged decodes."""
    rows = plan.shape.rows
    tokens, pages, state = buffers.tokens(rows), buffers.pages(rows), decoder.activations(rows)
    queries = state.projected.view(rows, -1, attention.head_dim)[:, : attention.heads]
    attended = state.attended.view(rows, attention.heads, attention.head_dim)
    decoder.open(tokens, state)
    for layer in range(decoder.layers):
        attention.decode(layer, plan, queries, pages, attended)
        if layer + 1 < decoder.layers:
            decoder.between(layer, tokens, state)
    return decoder.close(state, None)
