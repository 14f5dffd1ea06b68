"""A model without weights that shows a single wrong byte of KV: for tests and for trying a deployment out.

Every element of a token's KV is a hash of (token id, position, layer, K or V, head, element). The next token's logits are a hash
of all the KV bytes of the context, read from the pool through the block table. So a block, position, head, layer or byte
that is not what this request's own tokens would have written changes the text, while a correct engine gives `toy_logits`.

A folder for it holds config.json with {"architectures": ["ToyForCausalLM"], ...} and a tokenizer; `write_toy_folder` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_cache.storage import KvStorage, PoolShard
from engine.model.config import ModelConfig
from engine.sampling.sampler import sample
from engine.step import StepPlan, StepResult
from foundation.kv_layout import DTYPE_BYTES, KvLayout

UInt64 = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOGIT_RANGE = 8.0
WORDS = {4: np.uint32, 2: np.uint16}


def _mix(z: UInt64) -> UInt64:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def toy_kv(token_ids: npt.ArrayLike, positions: npt.ArrayLike, layout: KvLayout) -> npt.NDArray[Any]:
    """[T, layers, 2, kv_heads, head_dim] unsigned words of the KV dtype's width."""
    tokens = np.asarray(token_ids, np.int64).astype(np.uint64)
    places = np.asarray(positions, np.int64).astype(np.uint64)
    keys = _mix(_mix(tokens + GOLDEN) ^ places)
    shape = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    elements = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * GOLDEN
    words = _mix(keys[:, None] + elements) >> np.uint64(17)
    return words.astype(WORDS[DTYPE_BYTES[layout.dtype]]).reshape(len(keys), *shape)


def toy_logits_of_kv(kv: npt.NDArray[Any], vocabulary_size: int) -> npt.NDArray[np.float32]:
    """Logits [vocabulary_size] after a context whose KV is [positions, layers, 2, kv_heads, head_dim]."""
    words = kv.reshape(len(kv), -1).astype(np.uint64)
    places = _mix(np.arange(1, len(kv) + 1, dtype=np.uint64) * GOLDEN)
    elements = np.arange(words.shape[1], dtype=np.uint64) << np.uint64(33)
    state = _mix(words + elements + places[:, None]).sum(dtype=np.uint64)
    bits = _mix(state + np.arange(1, vocabulary_size + 1, dtype=np.uint64) * GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(LOGIT_RANGE / (1 << 24))


def toy_logits(token_ids: Sequence[int], layout: KvLayout, vocabulary_size: int) -> npt.NDArray[np.float32]:
    """The oracle: logits after `token_ids`, without any pool."""
    return toy_logits_of_kv(toy_kv(token_ids, np.arange(len(token_ids)), layout), vocabulary_size)


def toy_greedy(token_ids: Sequence[int], count: int, layout: KvLayout, vocabulary_size: int) -> list[int]:
    """The oracle's next `count` tokens; end-of-sequence tokens do not stop it."""
    history = list(token_ids)
    for _ in range(count):
        history.append(int(toy_logits(history, layout, vocabulary_size).argmax()))
    return history[len(token_ids) :]


class ToyProgram:
    """A `StepProgram` over the pool's bytes."""

    def __init__(self, storage: KvStorage, vocabulary_size: int) -> None:
        self._layout = storage.layout
        self._vocabulary_size = vocabulary_size
        self._shards = [_ShardWords(shard, storage.layout) for shard in storage.shards]
        self._previous_tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        fed = plan.feedback >= 0
        token_ids = plan.token_ids.copy()
        token_ids[fed] = self._previous_tokens[plan.feedback[fed]]
        kv = toy_kv(token_ids, plan.positions, self._layout)
        for shard in self._shards:
            shard.write(kv, *np.divmod(plan.slot_mapping, self._layout.block_size))
        logits = np.empty((len(plan.sample_tokens), self._vocabulary_size), np.float32)
        rows = np.searchsorted(plan.query_start, plan.sample_tokens, side="right") - 1
        for sample_index, (token, row) in enumerate(zip(plan.sample_tokens, rows, strict=True)):
            context = int(plan.context_lengths[row] - (plan.query_start[row + 1] - 1 - token))
            kv = self._read(plan.block_tables[row, : -(-context // self._layout.block_size)])[:context]
            logits[sample_index] = toy_logits_of_kv(kv, self._vocabulary_size)
        sampled = sample(torch.from_numpy(logits), plan.sampling)
        self._previous_tokens = sampled.token_ids.numpy()
        optional = (sampled.logprobs, sampled.top_token_ids, sampled.top_logprobs)
        return StepResult(self._previous_tokens, *(None if tensor is None else tensor.numpy() for tensor in optional))

    def _read(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        layout = self._layout
        shape = (len(blocks) * layout.block_size, layout.layers, 2, layout.kv_heads, layout.head_dim)
        kv = np.zeros(shape, WORDS[DTYPE_BYTES[layout.dtype]])
        for shard in self._shards:
            shard.read(kv, blocks)
        return kv


class _ShardWords:
    """One shard as words [groups, blocks, layer_group, 2, heads, block_size, head_dim], whatever its head order."""

    def __init__(self, shard: PoolShard, layout: KvLayout) -> None:
        words = shard.memory.view(WORDS[DTYPE_BYTES[layout.dtype]])
        self._words = words if layout.head_order == "HND" else words.swapaxes(4, 5)
        self._layers = slice(shard.first_layer, shard.end_layer)
        self._heads = slice(shard.first_head, shard.end_head)

    def write(self, kv: npt.NDArray[Any], blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
        groups, _, layer_group, *_ = self._words.shape
        part = kv[:, self._layers, :, self._heads]
        part = part.reshape(len(kv), groups, layer_group, *part.shape[2:])
        self._words[:, blocks, :, :, :, offsets] = part

    def read(self, kv: npt.NDArray[Any], blocks: npt.NDArray[np.int32]) -> None:
        """Fill this shard's share of `kv` [positions, layers, 2, kv_heads, head_dim]."""
        groups, _, layer_group, _, heads, block_size, head_dim = self._words.shape
        cells = self._words[:, blocks].transpose(1, 5, 0, 2, 3, 4, 6)
        shape = (len(blocks) * block_size, groups * layer_group, 2, heads, head_dim)
        kv[:, self._layers, :, self._heads] = cells.reshape(shape)


def toy_weights_fingerprint(model: ModelConfig) -> str:
    return f"toy:{model.layers}x{model.kv_heads}x{model.head_dim}"


END_OF_TEXT = "<|endoftext|>"
TOY_VOCABULARY_SIZE = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_toy_folder(
    folder: Path, *, layers: int = 4, kv_heads: int = 6, head_dim: int = 4, max_positions: int = 4096
) -> Path:
    """A model folder with a tokenizer of single bytes (ids 0..255) and one end-of-text token (256)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_id == TOY_VOCABULARY_SIZE - 1
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["ToyForCausalLM"],
        "model_type": "toy",
        "dtype": "float32",
        "vocab_size": TOY_VOCABULARY_SIZE,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": kv_heads * head_dim,
        "intermediate_size": 1,
        "max_position_embeddings": max_positions,
        "eos_token_id": end_id,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", {"eos_token_id": end_id}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return folder
