"""A model folder's config.json, read once and checked: everything the decoder needs and nothing else.

Unsupported values stop the start with the name of the field; nothing is silently ignored that would change a logit.
Must not know: weights, torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foundation.errors import ConfigurationError

Family = Literal["llama", "qwen2", "qwen3", "mistral", "toy"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "ToyForCausalLM": "toy",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; the fields after `theta` matter for kinds `linear` (factor) and `llama3` (all)."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_max_positions: int = 0

    def describe(self) -> str:
        """One line that two nodes can compare (fingerprint field `rope`)."""
        if self.kind == "default":
            return f"default theta={self.theta:g}"
        if self.kind == "linear":
            return f"linear theta={self.theta:g} factor={self.factor:g}"
        return (
            f"llama3 theta={self.theta:g} factor={self.factor:g} low={self.low_frequency_factor:g} "
            f"high={self.high_frequency_factor:g} original={self.original_max_positions}"
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a decoder. `max_positions` is the longest context that is exact with full attention."""

    architecture: str
    family: Family
    vocabulary_size: int
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """As the folder declares it: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...]

    @property
    def heads_per_kv_head(self) -> int:
        return self.heads // self.kv_heads


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; raises ConfigurationError naming --model."""
    if not path.is_file():
        raise ConfigurationError("--model", f"{path} does not exist; a Hugging Face model folder is expected")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError("--model", f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError("--model", f"{path} must hold a JSON object")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """Configuration of the model in `folder`. Raises ConfigurationError, naming file and field."""
    fields = _Fields(read_json(folder / "config.json"), folder / "config.json")
    architecture = fields.architecture()
    family = FAMILIES[architecture]
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden_size = fields.integer("hidden_size")
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, {heads}")
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise fields.refusal("hidden_act", activation, "silu is supported")
    if fields.get("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        raise fields.refusal("partial_rotary_factor", fields.get("partial_rotary_factor"), "1.0 is supported")
    if fields.get("quantization_config") is not None:
        raise fields.refusal("quantization_config", "...", "quantized weights are not supported")
    attention_bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocabulary_size=fields.integer("vocab_size"),
        layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // heads),
        max_positions=_max_positions(fields, family),
        norm_epsilon=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(folder, fields),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """config.json with errors that name file and field."""

    values: Mapping[str, Any]
    path: Path

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def refusal(self, field: str, value: Any, right: str) -> ConfigurationError:
        return ConfigurationError("--model", f"{self.path}: {field} is {value!r}; {right}")

    def architecture(self) -> str:
        architectures = self.get("architectures")
        if not (isinstance(architectures, list) and architectures and architectures[0] in FAMILIES):
            raise self.refusal("architectures", architectures, f"supported: {', '.join(FAMILIES)}")
        return str(architectures[0])

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise self.refusal(name, value, "a positive integer is expected")
        return value


def _max_positions(fields: _Fields, family: Family) -> int:
    """A sliding window bounds the context instead of being implemented: within it, full attention is the same thing."""
    positions = fields.integer("max_position_embeddings")
    window = fields.get("sliding_window")
    slides = family == "mistral" or (family in ("qwen2", "qwen3") and bool(fields.get("use_sliding_window", False)))
    return min(positions, int(window)) if slides and window else positions


def _rope(fields: _Fields) -> RopeConfig:
    """Older folders carry rope_theta and rope_scaling, newer ones rope_parameters."""
    parameters: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", float(parameters["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise fields.refusal("rope_scaling.rope_type", kind, "supported: default, linear, llama3")


def _dtype(fields: _Fields) -> str:
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.refusal("dtype", dtype, "supported: float32, bfloat16, float16")
    return dtype


def _eos_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    """generation_config.json has the last word, as in transformers."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
