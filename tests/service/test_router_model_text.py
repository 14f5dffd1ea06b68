"""The default model's own tokenizer and template, against transformers."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from router_model_folder import write_model_folder

from foundation.errors import ConfigurationError
from router.intake import Intake
from router.text import AnswerText
from router.tokenizer import ModelText

SENTENCES = (
    "The quick brown fox jumps over 13 lazy dogs, 2025.",
    "Größe, naïveté, café — déjà vu",
    "東京は日本の首都です。 中文没有空格",
    "Привет, мир! 🦊👩‍👩‍👧‍👦 नमस्ते",
    "def f(x):\n    return {'a': x ** 2}\n\n\t# done",
)


@pytest.fixture(scope="module")
def text(default_model: Path) -> ModelText:
    return ModelText.from_folder(default_model)


@pytest.mark.model
@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_pieces_of_real_text_join_to_it(text: ModelText, sentence: str) -> None:
    answer = AnswerText(text.detokenizer(text.encode("A prompt:")), ())
    pieces = [answer.add(token_id) for token_id in text.encode(sentence)]
    assert "".join([*pieces, answer.finish()]) == sentence
    assert not any("�" in piece for piece in pieces)


@pytest.mark.model
def test_any_tokens_of_the_model_join_to_the_text_of_all(text: ModelText) -> None:
    draw = random.Random(7)
    for _ in range(200):
        token_ids = [draw.randrange(text.vocabulary_size) for _ in range(draw.randrange(1, 60))]
        answer = AnswerText(text.detokenizer(()), ())
        assert "".join([*(answer.add(token_id) for token_id in token_ids), answer.finish()]) == text.decode(token_ids)


@pytest.mark.model
async def test_other_requests_go_on_while_a_long_text_is_tokenized(text: ModelText) -> None:
    intake = Intake("model", text, lambda: 1 << 31, 60.0)
    long_text, turns = SENTENCES[0] * 8000, 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    going_on = asyncio.create_task(others())
    (tokens,) = await intake.tokenize("prompt", [long_text], special_tokens=True)
    going_on.cancel()
    assert tokens == text.encode(long_text)
    assert turns > 500, "under the interpreter's lock there are about 30"


@pytest.mark.model
def test_tokens_and_chats_are_what_transformers_makes_of_them(text: ModelText, default_model: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(default_model)
    for sentence in SENTENCES:
        assert text.encode(sentence) == reference(sentence)["input_ids"]
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Was ist 2 + 2?"}],
    ):
        rendered = text.render_chat(messages)
        assert rendered == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert text.encode(rendered, special_tokens=False) == expected


def test_a_template_cannot_reach_outside_its_sandbox(tmp_path: Path) -> None:
    from router.tokenizer import ChatTemplateRefused

    for escape in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        folder = write_model_folder(tmp_path / "m", chat_template=escape)
        model_text = ModelText.from_folder(folder)
        with pytest.raises(ChatTemplateRefused):
            model_text.render_chat([{"role": "user", "content": "x"}])


def test_broken_folders_are_named_with_their_setting(tmp_path: Path) -> None:
    def problem(folder: Path) -> str:
        with pytest.raises(ConfigurationError, match="--model") as caught:
            ModelText.from_folder(folder)
        return str(caught.value)

    assert "not a folder" in problem(tmp_path / "missing")
    folder = write_model_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in problem(folder)
    write_model_folder(folder, chat_template="{% if %}")
    assert "chat template" in problem(folder)
    (folder / "tokenizer.json").write_text("nonsense")
    assert "tokenizer.json" in problem(folder)
    (folder / "tokenizer.json").unlink()
    assert "holds no tokenizer.json" in problem(folder)
    (folder / "config.json").write_text(json.dumps([]))
    assert "config.json" in problem(folder)


def test_the_models_recommended_sampling_is_the_default(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 256}))
    defaults = ModelText.from_folder(folder).sampling_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.6, 20, 1.0, 0.0)
