"""Model folders and settings that do not go together are refused by name before a node serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from foundation.errors import ConfigurationError
from node.engine_setup import prepare_engine
from node.options import DecodeOptions

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def refusal(folder: Path, **settings: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refused:
        prepare_engine(DecodeOptions(model=str(folder), **settings))
    return refused.value


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'; a positive integer is expected"),
        ({"hidden_size": -8}, "hidden_size is -8; a positive integer is expected"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures is ['OtherForCausalLM']; supported: LlamaForCausalLM"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_named_by_its_field(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    found = str(refusal(tmp_path))
    assert found.startswith("--model: ")
    assert problem in found


WHOLE = save({"model.embed_tokens.weight": np.zeros((8, 24), np.float32)})


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (None, "does not exist; weights are read from safetensors files"),
        (b"no safetensors at all", "is no whole safetensors file"),
        (WHOLE[:-9], "is no whole safetensors file"),
        (WHOLE, "the weights lack "),
    ],
    ids=["missing", "garbage", "cut short", "incomplete"],
)
def test_weights_that_cannot_be_served_are_named(tmp_path: Path, weights: bytes | None, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    found = str(refusal(tmp_path))
    assert found.startswith("--model: ")
    assert problem in found


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("tensor_parallel_size", 2, "is 2; it must divide the 3 KV heads or be larger"),
        ("pipeline_parallel_size", 5, "is 5; the model has 4 layers"),
        ("kv_layer_group", 3, "is 3; it must divide the 4 layers of a pipeline stage"),
        ("kv_layer_group", 8, "is 8; the model has 4 layers"),
        ("max_model_len", 65, "is 65; this model takes from 1 to 64"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_named_with_what_would(
    tmp_path: Path, setting: str, value: int, problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = str(refusal(tmp_path, load_format="dummy", **{setting: value}))
    assert found == f"--{setting.replace('_', '-')}: {problem}"
