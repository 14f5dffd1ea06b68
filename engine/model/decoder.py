"""The decoder, once for all families: pre-norm transformer with rotary grouped-query attention and a gated MLP.

Llama (Touvron et al., 2023), Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k heads) differ by data in
`ModelConfig`, not by code. q, k and v are one product, gate and up are one product. All tokens of a mixed batch go
through one forward; only rows whose logits are wanted leave the last layer.

Must not know: requests, blocks, how weights were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.base import StepAttention
from engine.model.config import ModelConfig
from engine.model.layers import Linear
from engine.model.rope import RopeTable, rotate


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. `query_norm` and `key_norm` [head_dim] are Qwen3's, else None."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Linear,
        max_positions: int,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rope = RopeTable(config.rope, config.head_dim, max_positions, embedding.dtype, embedding.device)

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        sample_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [S, vocabulary] of tokens `sample_tokens` [S] out of T (None: of all T, in order); the rest as in `hidden`."""
        return self.head(self.hidden(token_ids, positions, attention, sample_tokens))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        wanted_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """What `head` makes logits of, [S, hidden], of tokens `wanted_tokens` [S] out of T (None: of all T, in order).

        `token_ids` and `positions` are int64 [T]. Keys and values of all T tokens are stored by `attention`.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos, sin = self.rope.at(positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, self._norm(hidden, layer.input_norm), cos, sin, attention)
            if index == last and wanted_tokens is not None:
                attended, hidden = attended[wanted_tokens], hidden[wanted_tokens]
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return self._norm(hidden, self.final_norm)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        config = self.config
        rotated_heads = config.heads + config.kv_heads
        heads = layer.qkv(normed).view(-1, rotated_heads + config.kv_heads, config.head_dim)
        turning = heads[:, :rotated_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(turning[:, : config.heads], layer.query_norm)
            turning = torch.cat((queries, self._norm(turning[:, config.heads :], layer.key_norm)), dim=1)
        rotated = rotate(turning, cos, sin)
        return attention.attend(index, rotated[:, : config.heads], rotated[:, config.heads :], heads[:, rotated_heads:])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_epsilon)
