"""Weights from a Hugging Face folder (or from a seed) into a decoder, and the fingerprint taken on the way.

A source names tensors and hands them out one by one; `build_decoder` asks for every name that the configuration implies,
checks its shape, fuses what is computed together, and refuses tensors that it would otherwise leave unused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from engine.model.config import ModelConfig, read_json
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.layers import Linear
from foundation.errors import ConfigurationError
from foundation.fingerprint import Fingerprint

PROTOCOL_MAJOR = 1


class TensorSource(Protocol):
    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor as it is stored; may be a view of a mapped file."""

    def fingerprint(self) -> str:
        """Identity of all tensors. Complete only after every name has been got once."""


class FolderTensors:
    """safetensors of a folder: model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        self._files = [_opened(path) for path in _weight_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        self._hashes: dict[str, int] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        digest = xxhash.xxh3_64(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._hashes[name] = digest.intdigest()
        return tensor

    def fingerprint(self) -> str:
        assert self._hashes.keys() == self._file_of.keys(), "every tensor must have been read"
        whole = xxhash.xxh3_64()
        for name in sorted(self._hashes):
            whole.update(self._hashes[name].to_bytes(8, "little"))
        return f"xxh3:{whole.hexdigest()}"


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError("--model", f"{path} is no whole safetensors file: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigurationError("--model", f"{file} does not exist; weights are read from safetensors files")
    return files


class DummyTensors:
    """Random weights: each tensor is drawn from a generator keyed by seed and name, so order does not matter.

    They are drawn on `device`; another kind of device draws others.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | None = None) -> None:
        self._shapes = tensor_shapes(config)
        self._config = config
        self._seed = seed
        self._device = device or torch.device("cpu")

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode()) >> 1)
        values = torch.randn(self._shapes[name], generator=generator, device=self._device)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        return values * (0.02 if name.endswith("bias") else self._shapes[name][-1] ** -0.5)

    def fingerprint(self) -> str:
        where = "" if self._device.type == "cpu" else f"{self._device.type}:"
        return f"dummy:{where}{xxhash.xxh3_64_hexdigest(repr(self._config).encode())}:{self._seed}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key = config.heads * head_dim, config.kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary_size, hidden)}
    products = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, (out_features, in_features, bias) in products.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        for name, width in norms.items():
            shapes[f"{prefix}{name}.weight"] = (width,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    return shapes


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked reading of one source into one dtype and device."""

    source: TensorSource
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def check_names(self, config: ModelConfig) -> None:
        wanted, held = self.shapes.keys(), self.source.names()
        if missing := sorted(wanted - held):
            raise ConfigurationError("--model", f"the weights lack {missing[0]} ({len(missing)} tensors in all)")
        for name in sorted(held - wanted):
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                self.source.get(name)
            else:
                raise ConfigurationError("--model", f"tensor {name} has no place in a {config.architecture}")

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self.source.get(name)
        if tuple(tensor.shape) != self.shapes[name]:
            raise ConfigurationError(
                "--model", f"{name} has shape {list(tensor.shape)}; config.json implies {list(self.shapes[name])}"
            )
        return tensor.to(self.device, self.dtype)

    def linear(self, prefix: str, names: Iterable[str]) -> Linear:
        """The named products as one, their outputs side by side."""
        paths = [f"{prefix}{name}" for name in names]
        weight = torch.cat([self.tensor(f"{path}.weight") for path in paths])
        biased = f"{paths[0]}.bias" in self.shapes
        return Linear(weight, torch.cat([self.tensor(f"{path}.bias") for path in paths]) if biased else None)


def build_decoder(
    config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device, max_positions: int
) -> Decoder:
    """Read every tensor of `source` once. Raises ConfigurationError for missing, misshapen or unknown tensors."""
    reader = _Reader(source, tensor_shapes(config), dtype, device)
    reader.check_names(config)
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        layers.append(
            DecoderLayer(
                input_norm=reader.tensor(f"{prefix}input_layernorm.weight"),
                qkv=reader.linear(prefix, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                query_norm=reader.tensor(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
                key_norm=reader.tensor(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
                output=reader.linear(prefix, ("self_attn.o_proj",)),
                mlp_norm=reader.tensor(f"{prefix}post_attention_layernorm.weight"),
                gate_up=reader.linear(prefix, ("mlp.gate_proj", "mlp.up_proj")),
                down=reader.linear(prefix, ("mlp.down_proj",)),
            )
        )
    embedding = reader.tensor("model.embed_tokens.weight")
    head = Linear(embedding if config.tied_embeddings else reader.tensor("lm_head.weight"))
    return Decoder(config, embedding, layers, reader.tensor("model.norm.weight"), head, max_positions)


def fingerprint_of(folder: Path, config: ModelConfig, weights: str, kv_dtype: str) -> Fingerprint:
    tokenizer = folder / "tokenizer.json"
    return Fingerprint(
        weights=weights,
        architecture=config.architecture,
        tokenizer=f"xxh3:{xxhash.xxh3_64_hexdigest(tokenizer.read_bytes())}" if tokenizer.is_file() else "none",
        vocabulary_size=config.vocabulary_size,
        kv_dtype=kv_dtype,
        quantization="none",
        rope=config.rope.describe(),
        protocol_major=PROTOCOL_MAJOR,
    )
