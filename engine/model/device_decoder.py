"""The decoder of `engine.model.decoder` on fused GPU kernels, cut where attention stands, so that what lies between two
attentions can be captured as one graph.

    open -> [attention] -> between 0 -> [attention] -> between 1 ... -> [attention] -> close

A stretch takes and leaves its tensors in `Activations`, whose addresses a captured stretch keeps. Same weights, same families,
same order of operations as the definition; the tests hold the two against each other.

All but the products is computed row by row with one configuration for any number of rows. With `invariant_tilings` the products
are as well, so that a row's bits do not depend on its step.

Must not know: requests, plans, how attention is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.invariant_product import Tiling, invariant_product, tiling_for
from engine.kernels.layer import add_norm, gate, rotate_append
from engine.kernels.product import ROWS_AT_MOST, product
from engine.kv_cache.device_storage import DeviceKvStorage
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.layers import Linear
from engine.model.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of T tokens, int32 [T] each on the device; a slot is block * block_size + offset."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(slots=True)
class Activations:
    """What passes between stretches: residual stream [T, hidden], q, k, v [T, ...] and attention's output [T, heads * dim]."""

    hidden: torch.Tensor
    projected: torch.Tensor
    attended: torch.Tensor


class DeviceDecoder:
    def __init__(
        self,
        decoder: Decoder,
        storage: DeviceKvStorage,
        max_positions: int,
        *,
        own_products: bool = True,
        invariant_tilings: tuple[Tiling, ...] = (),
    ) -> None:
        """`own_products`: batches of at most `ROWS_AT_MOST` rows are multiplied by our kernel, not the library's.

        `invariant_tilings`: if any, all products are `invariant_product`, in these.
        """
        config = decoder.config
        device = decoder.embedding.device
        self.config = config
        self.layers = len(decoder.layers)
        self._decoder = decoder
        self._hnd = storage.layout.head_order == "HND"
        self._kv = [storage.layer(layer) for layer in range(self.layers)]
        self._own_rows = ROWS_AT_MOST if own_products and not invariant_tilings else -1
        self._tilings = invariant_tilings
        # Steps of warm-up fill the last block of the longest row.
        reached = -(-max_positions // storage.layout.block_size) * storage.layout.block_size
        angles = torch.outer(
            torch.arange(reached, dtype=torch.float32), inverse_frequencies(config.rope, config.head_dim)
        )
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    @property
    def invariant(self) -> bool:
        """A row's bits do not depend on its step."""
        return bool(self._tilings)

    def activations(self, tokens: int) -> Activations:
        """Fresh memory for a step of so many tokens."""
        config, embedding = self.config, self._decoder.embedding
        return Activations(
            hidden=embedding.new_empty(tokens, config.hidden_size),
            projected=embedding.new_empty(tokens, (config.heads + 2 * config.kv_heads) * config.head_dim),
            attended=embedding.new_empty(tokens, config.heads * config.head_dim),
        )

    def open(self, tokens: Tokens, state: Activations) -> None:
        """Embedding to the first layer's q, k, v."""
        torch.index_select(self._decoder.embedding, 0, tokens.token_ids, out=state.hidden)
        first = self._decoder.layers[0]
        self._project(0, add_norm(state.hidden, None, first.input_norm, self.config.norm_epsilon), tokens, state)

    def between(self, layer: int, tokens: Tokens, state: Activations) -> None:
        """From attention's output in `layer` to q, k, v of the next one."""
        delta = self._mlp(self._decoder.layers[layer], state.hidden, state.attended)
        following = self._decoder.layers[layer + 1]
        normed = add_norm(state.hidden, delta, following.input_norm, self.config.norm_epsilon)
        self._project(layer + 1, normed, tokens, state)

    def close(self, state: Activations, sample_tokens: torch.Tensor | None) -> torch.Tensor:
        """Logits [S, vocabulary] of tokens `sample_tokens` [S] (None: of all, in order)."""
        hidden, attended = state.hidden, state.attended
        if sample_tokens is not None:
            hidden, attended = hidden[sample_tokens], attended[sample_tokens]
        delta = self._mlp(self._decoder.layers[-1], hidden, attended)
        return self._times(
            self._decoder.head, add_norm(hidden, delta, self._decoder.final_norm, self.config.norm_epsilon)
        )

    def _project(self, index: int, normed: torch.Tensor, tokens: Tokens, state: Activations) -> None:
        """q, k, v of layer `index`: queries rotated in place, keys and values into the pool."""
        layer = self._decoder.layers[index]
        if self._tilings:
            self._invariant(layer.qkv, normed, state.projected)
        elif len(normed) == self._own_rows and layer.qkv.bias is None:
            product(normed, _weight(layer.qkv), state.projected)
        elif layer.qkv.bias is None:
            torch.mm(normed, _weight(layer.qkv).t(), out=state.projected)
        else:
            torch.addmm(layer.qkv.bias, normed, _weight(layer.qkv).t(), out=state.projected)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        rotate_append(
            state.projected,
            tokens.positions,
            tokens.slots,
            self._cos,
            self._sin,
            self._kv[index],
            self.config.heads,
            self._hnd,
            norms,
            self.config.norm_epsilon,
        )

    def _mlp(self, layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection into the residual stream, then the gated MLP, whose output the next norm adds."""
        normed = add_norm(hidden, self._times(layer.output, attended), layer.mlp_norm, self.config.norm_epsilon)
        if len(normed) == self._own_rows and layer.gate_up.bias is None:
            gated = product(normed, _weight(layer.gate_up), gated=True)
        else:
            gated = gate(self._times(layer.gate_up, normed))
        return self._times(layer.down, gated)

    def _times(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if self._tilings:
            return self._invariant(linear, x)
        if len(x) == self._own_rows and linear.bias is None:
            return product(x, _weight(linear))
        return F.linear(x, _weight(linear), linear.bias)

    def _invariant(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        weight = _weight(linear)
        return invariant_product(x, weight, linear.bias, tiling_for(self._tilings, len(x), len(weight)), out)


def _weight(linear: Linear) -> torch.Tensor:
    assert linear.weight is not None, "linear forms are chosen on CPUs only"
    return linear.weight
