"""The converted default model is the real one: right tokens, right template, right words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decant.gguf_conversion import hugging_face_name, split_halves_of_rope

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model)


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("In 1969, 42") == ["In", "Ġ", "1", "9", "6", "9", ",", "Ġ", "4", "2"]


@pytest.mark.parametrize(
    "text", ["Grüße aus 北京, 1 2 3  4\n\tcafé 👩‍🚀", "def f(x): return x**2", "مرحبا بالعالم", " "]
)
def test_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_single_ids(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[0] == 1
    assert tokenizer.encode("<|im_end|>") == [2]


def test_the_chat_template_is_there(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_knows_a_capital_and_when_to_stop(default_model: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_rotary_halves_are_split_back_as_llama_cpp_joined_them() -> None:
    heads, head_dim, hidden = 3, 8, 5
    original = np.random.default_rng(0).standard_normal((heads * head_dim, hidden), dtype=np.float32)
    # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute
    joined = original.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(original.shape)
    assert np.array_equal(split_halves_of_rope(joined, heads), original)


def test_names_become_those_of_hugging_face() -> None:
    assert hugging_face_name("blk.7.attn_output.weight") == "model.layers.7.self_attn.o_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
