"""From a llama-architecture GGUF file to a plain Hugging Face folder in float32.

transformers reads GGUF too, but slowly, refuses to save what it read, and rebuilds the tokenizer without its digit splitting;
so this is done once, and the engine loads the result like any other folder.

Must not know: where the file comes from, where the folder goes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from foundation.errors import SetupError

CONTROL_TOKEN = 3
"""GGUF's `token_type` of tokens that never come out of ordinary text."""

Weights = dict[str, npt.NDArray[np.float32]]


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder`, which must not exist yet. Raises SetupError when the file lacks a field that a Llama model needs."""
    reader = GGUFReader(gguf)
    folder.mkdir(parents=True)
    weights_file = folder / "model.safetensors"
    save_file(read_weights(reader), weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)  # safetensors writes it for the owner alone
    read_tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", model_config(reader))
    _write_json(folder / "generation_config.json", generation_config(reader))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(reader))


def read_weights(reader: GGUFReader) -> Weights:
    """All tensors under their Hugging Face names, dequantized to float32, in PyTorch's [out, in] order."""
    query_heads = _field(reader, "llama.attention.head_count")
    kv_heads = _field(reader, "llama.attention.head_count_kv")
    weights: Weights = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.endswith("attn_q.weight"):
            values = split_halves_of_rope(values, query_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = split_halves_of_rope(values, kv_heads)
        weights[hugging_face_name(tensor.name)] = values
    return weights


def split_halves_of_rope(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's reordering of query and key rows, [heads * head_dim, hidden].

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head; Hugging Face rotates (i, i + head_dim / 2).
    """
    head_dim = weight.shape[0] // heads
    pairs = weight.reshape(heads, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


_OUTSIDE_LAYERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_INSIDE_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    if gguf_name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[gguf_name]
    _, layer, part, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_INSIDE_LAYER[part]}.weight"


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE that splits digits first: without it, ids differ around spaces before digits."""
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def model_config(reader: GGUFReader) -> dict[str, Any]:
    rope_theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        # The file holds it as a 32-bit float; the model's own is its shortest decimal (1e-05).
        "rms_norm_eps": float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        # Both spellings: transformers 5 reads the second, older readers the first.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def generation_config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": _field(reader, "llama.context_length"),
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise SetupError(f"the GGUF file has no field {key}: not a llama-architecture model with a BPE tokenizer")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
