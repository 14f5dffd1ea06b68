"""A small model folder for routers under test: one token for each byte, an end token, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|end|>"
END_ID = 256
CONTEXT_LIMIT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; so multi-byte characters span tokens."""
    alphabet = {byte: symbol for symbol, byte in _symbols_of_bytes().items()}
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.token_to_id(END_OF_TEXT) == END_ID
    return tokenizer


def _symbols_of_bytes() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for what follows 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def write_model_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": CONTEXT_LIMIT, "vocab_size": END_ID + 1, "eos_token_id": END_ID}
    tokenizer_config = {"eos_token": END_OF_TEXT}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
