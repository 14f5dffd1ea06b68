"""A model without weights that shows a single wrong byte of KV: for tests and for trying a deployment out.

`toy_kv` says what it computes; here it is a `StepProgram`, and a model folder: config.json with
{"architectures": ["ToyForCausalLM"], ...} and a tokenizer; `write_toy_folder` makes one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_cache.storage import KvStorage
from engine.model.config import ModelConfig
from engine.model.toy_kv import ToyPool, toy_kv, toy_logits_of_kv
from engine.sampling.prompt_scores import score
from engine.sampling.sampler import sample
from engine.step import ScoredTokens, StepPlan, StepResult, TokenScores


class ToyProgram:
    """A `StepProgram` over the pool's bytes."""

    def __init__(self, storage: KvStorage, vocabulary_size: int) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._vocabulary_size = vocabulary_size
        self._pool = ToyPool(storage)
        self._previous_tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        if len(plan.block_copies):
            self._storage.copy_blocks(plan.block_copies)
        fed = plan.feedback >= 0
        token_ids = plan.token_ids.copy()
        token_ids[fed] = self._previous_tokens[plan.feedback[fed]]
        kv = toy_kv(token_ids, plan.positions, self._layout)
        self._pool.write(kv, plan.slot_mapping)
        logits = self._logits(plan, plan.sample_tokens)
        sampled = sample(logits, plan.sampling, torch.from_numpy(self._previous_tokens))
        self._previous_tokens = sampled.token_ids.numpy()
        logprobs, top_token_ids, top_logprobs = (
            None if tensor is None else tensor.numpy()
            for tensor in (sampled.logprobs, sampled.top_token_ids, sampled.top_logprobs)
        )
        scores = self._scores(plan, plan.scored)
        return StepResult(self._previous_tokens, logprobs, top_token_ids, top_logprobs, scores)

    def _scores(self, plan: StepPlan, scored: ScoredTokens | None) -> TokenScores | None:
        if scored is None:
            return None
        next_token_ids = torch.from_numpy(scored.next_token_ids)
        scores = score(
            lambda begin, end: self._logits(plan, scored.tokens[begin:end]),
            next_token_ids,
            self._vocabulary_size,
            scored.best,
        )
        return scores.to_host()

    def _logits(self, plan: StepPlan, tokens: npt.NDArray[Any]) -> torch.Tensor:
        """[len(tokens), vocabulary] of some of the step's tokens, from the KV of each one's context."""
        logits = np.empty((len(tokens), self._vocabulary_size), np.float32)
        rows = np.searchsorted(plan.query_start, tokens, side="right") - 1
        for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            context = int(plan.context_lengths[row] - (plan.query_start[row + 1] - 1 - token))
            kv = self._pool.read(plan.block_tables[row], context)
            logits[index] = toy_logits_of_kv(kv, self._vocabulary_size)
        return torch.from_numpy(logits)


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
