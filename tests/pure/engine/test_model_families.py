"""Each family's logits against transformers' own model, in float32, on small random weights with uneven shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from step_plans import batch_plan

from engine.attention.paged import PagedAttention
from engine.executor.inputs import step_inputs
from engine.kv_cache.storage import KvStorage
from engine.model.config import read_model_config
from engine.model.decoder import Decoder
from engine.model.loader import DummyTensors, FolderTensors, build_decoder
from foundation.errors import ConfigurationError
from foundation.kv_layout import KvLayout

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, {}),
    "llama tied": ("LlamaForCausalLM", transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama biased": ("LlamaForCausalLM", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama rope llama3": ("LlamaForCausalLM", transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama rope linear": (
        "LlamaForCausalLM",
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config, {}),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, {}),
}


def write_folder(folder: Path, case: str, seed: int = 3) -> tuple[Any, Path]:
    """Random weights drawn by `DummyTensors`, saved as a folder and loaded into transformers' model."""
    architecture, config_type, changes = CASES[case]
    config = config_type(**(SMALL | changes))
    config.architectures = [architecture]
    config._attn_implementation = "eager"
    folder.mkdir()
    config.save_pretrained(folder)
    source = DummyTensors(read_model_config(folder), seed)
    tensors = {name: source.get(name) for name in source.names()}
    save_file(tensors, folder / "model.safetensors")
    model = getattr(transformers, architecture)(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model, folder


def our_logits(decoder: Decoder, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Teacher-forced logits of every position, computed chunk by chunk over a paged pool."""
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, "float32", 4, "HND", config.layers)
    attention = PagedAttention(KvStorage(layout, 64), config.heads, torch.float32)
    blocks = np.random.default_rng(0).permutation(64).tolist()
    out, first = [], 0
    for count in chunks:
        plan = batch_plan(0, [(token_ids[first : first + count], first, blocks)], 4)
        inputs = step_inputs(plan, None, CPU)
        out.append(decoder.forward(inputs.token_ids, inputs.positions, attention.prepare(plan), None))
        first += count
    assert first == len(token_ids)
    return torch.cat(out)


@pytest.mark.parametrize("case", list(CASES))
@torch.inference_mode()
def test_logits_equal_transformers_for_every_family(tmp_path: Path, case: str) -> None:
    oracle, folder = write_folder(tmp_path / "model", case)
    token_ids = torch.randint(0, 331, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = build_decoder(read_model_config(folder), FolderTensors(folder), torch.float32, CPU, 256)
    expected = oracle(torch.tensor([token_ids])).logits[0]
    got = our_logits(decoder, token_ids, [70, 1, 1, 20, 1, 57])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
    assert float(expected.std()) > 0.1


@torch.inference_mode()
def test_a_sharded_folder_equals_a_single_file_and_its_fingerprint(tmp_path: Path) -> None:
    _, folder = write_folder(tmp_path / "model", "llama")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((folder / "config.json").read_text())
    source = FolderTensors(folder)
    names = sorted(source.names())
    weight_map = {name: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: source.get(name) for name in names if weight_map[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = read_model_config(folder)
    one, many = FolderTensors(folder), FolderTensors(sharded)
    decoders = [build_decoder(config, tensors, torch.float32, CPU, 64) for tensors in (one, many)]
    logits = [our_logits(decoder, list(range(30)), [30]) for decoder in decoders]
    assert torch.equal(*logits)
    assert one.fingerprint() == many.fingerprint()


def test_one_changed_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    _, folder = write_folder(tmp_path / "model", "llama")
    config = read_model_config(folder)
    before = FolderTensors(folder)
    build_decoder(config, before, torch.float32, CPU, 64)
    tensors = {name: before.get(name).clone() for name in before.names()}
    tensors["model.norm.weight"][5] += 1e-6
    save_file(tensors, folder / "model.safetensors")
    after = FolderTensors(folder)
    build_decoder(config, after, torch.float32, CPU, 64)
    assert before.fingerprint() != after.fingerprint()
    assert DummyTensors(config, 1).fingerprint() != DummyTensors(config, 2).fingerprint()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_an_unsupported_config_is_refused_by_the_name_of_its_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"]} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=named):
        read_model_config(tmp_path)


def test_a_broken_folder_is_refused_by_the_name_of_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_model_config(tmp_path)
    _, folder = write_folder(tmp_path / "model", "llama")
    config = read_model_config(folder)
    whole = FolderTensors(folder)
    tensors = {name: whole.get(name) for name in whole.names()}
    missing = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    misshapen = tensors | {"model.norm.weight": torch.ones(61)}
    unknown = tensors | {"model.layers.0.self_attn.sinks": torch.ones(10)}
    for broken, message in (
        (missing, r"lack model\.layers\.1\.mlp\.down_proj\.weight \(3 tensors"),
        (misshapen, r"model\.norm\.weight has shape \[61\]; config\.json implies \[60\]"),
        (unknown, "sinks has no place"),
    ):
        save_file(broken, folder / "model.safetensors")
        with pytest.raises(ConfigurationError, match=message):
            build_decoder(config, FolderTensors(folder), torch.float32, CPU, 64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="read from safetensors"):
        FolderTensors(folder)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    config = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path).max_positions == 100
