"""The served model as text: its tokenizer, chat template and recommended sampling, from a Hugging Face folder.

Only `tokenizers` and Jinja in a sandbox are needed, so a router carries neither torch nor transformers.

Must not know: requests, nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import xxhash
from tokenizers import Tokenizer

from foundation.errors import ConfigurationError
from router.generation import SamplingDefaults
from router.text import AnyDetokenizer, ByteDetokenizer, Detokenizer

SETTING = "--model"
TEMPLATE_SETTING = "--chat-template"
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template's expressions raise on values that it was not written for."""
_WORD_BEFORE = "a"
"""Stands before a token that is named alone."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NoChatTemplate(Exception):
    """The model has no chat template, so messages cannot become a prompt."""


class ChatTemplateRefused(Exception):
    """The template itself refuses these messages, or cannot render them."""


class ModelText:
    """Thread-safe: nothing changes after it has been built, but for what is remembered."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        sampling_defaults: SamplingDefaults | None = None,
        context_limit: int | None = None,
        vocabulary_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Raises jinja2.TemplateSyntaxError when the template is none. `context_limit` and `vocabulary_size`: the model's own,
        where it names them; `fingerprint`: of tokenizer.json, as nodes give it in theirs."""
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = _environment().from_string(chat_template) if chat_template is not None else None
        self._template_words = _words_of(chat_template) if chat_template is not None else frozenset()
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.context_limit = context_limit
        self.vocabulary_size: int = vocabulary_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = fingerprint
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._bytes_of_symbols = _byte_level_alphabet() if decoder.get("type") == "ByteLevel" else None
        self._falls_back_to_bytes = any(part.get("type") == "ByteFallback" for part in decoder.get("decoders", ()))
        self._before = [] if self._bytes_of_symbols else self.encode(_WORD_BEFORE, special_tokens=False)
        self._bytes = _TokenBytes(lambda token_id: bytes(self.token_bytes(token_id)))
        self._bytes_without_special = _TokenBytes(
            lambda token_id: self._bytes[token_id] if self.decode([token_id]) else b""
        )

    @classmethod
    def from_folder(cls, folder: Path, chat_template: Path | None = None) -> ModelText:
        """`chat_template`: a file to be used instead of the model's own.

        Raises ConfigurationError naming --model or --chat-template and the file that is missing or broken.
        """
        if not folder.is_dir():
            raise ConfigurationError(SETTING, f"{folder} is not a folder")
        config = _read_json(folder / "config.json", required=True)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(SETTING, f"{folder} holds no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigurationError(SETTING, f"{file} is not a tokenizer: {error}") from None
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        template = _chat_template(folder, tokenizer_config) if chat_template is None else _read_template(chat_template)
        try:
            return cls(
                tokenizer,
                template,
                _special_tokens(tokenizer_config),
                _sampling_defaults(_read_json(folder / "generation_config.json")),
                _whole_number(config, "max_position_embeddings"),
                _whole_number(config, "vocab_size"),
                f"xxh3:{xxhash.xxh3_64_hexdigest(file.read_bytes())}",
            )
        except jinja2.TemplateSyntaxError as error:
            setting, place = (SETTING, folder) if chat_template is None else (TEMPLATE_SETTING, chat_template)
            raise ConfigurationError(setting, f"the chat template of {place} cannot be read: {error}") from None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def encode_unlocked(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The same for a thread of its own: `Tokenizer.encode` (0.23) lets other threads run only once in about 10 ms."""
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens skipped; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> AnyDetokenizer:
        """Of one answer; `context`: the last few tokens of its prompt."""
        if self._bytes_of_symbols is None:
            return Detokenizer(self.decode if skip_special_tokens else self.decode_all, context)
        return ByteDetokenizer(self._bytes_without_special if skip_special_tokens else self._bytes, context)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Special tokens written out, as in lists of log probabilities."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token_text(self, token_ids: Sequence[int]) -> str:
        """The same in the middle of a text. (SentencePiece's decoders drop the space that begins one, so that alone "▁a" and "a"
        would be written alike.)"""
        if self._before:
            before, text = self.decode_all(self._before), self.decode_all([*self._before, *token_ids])
            if text.startswith(before):
                return text[len(before) :]
        return self.decode_all(token_ids)

    def symbols(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the tokenizer itself writes them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> list[int]:
        """The bytes that a token stands for; several tokens may share one character's bytes."""
        symbols: str | None = self._tokenizer.id_to_token(token_id)
        if self._bytes_of_symbols is None:
            byte = _BYTE_PIECE.fullmatch(symbols or "") if self._falls_back_to_bytes else None
            return [int(byte[1], 16)] if byte else list(self.token_text([token_id]).encode())
        found = [self._bytes_of_symbols.get(symbol) for symbol in symbols or ""]
        if any(byte is None for byte in found):  # an added token, which is written as it is
            return list(self.decode_all([token_id]).encode())
        return [byte for byte in found if byte is not None]

    def template_knows(self, word: str) -> bool:
        """Whether the chat template asks for a variable or a field of this name; what it never asks for it cannot write."""
        return word in self._template_words

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """The prompt's text, the assistant's turn opened; `variables` are further ones of the template.

        Raises NoChatTemplate or ChatTemplateRefused.
        """
        if self._chat_template is None:
            raise NoChatTemplate
        defaults = {"add_generation_prompt": True, "tools": None, "documents": None, **self._special_tokens}
        try:
            return self._chat_template.render({**defaults, **variables, "messages": messages})
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateRefused(str(error)) from None


def _words_of(template: str) -> frozenset[str]:
    """Names of variables and fields, and the constants by which fields are asked for (`message['content']`)."""
    tree = _environment().parse(template)
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    fields = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    constants = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return frozenset(names | fields | constants)


class _TokenBytes(dict[int, bytes]):
    """What tokens write, as far as they have been asked for: at most the vocabulary."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _whole_number(config: Mapping[str, Any], name: str) -> int | None:
    """A number of the language model, which configs of models with several parts keep one level down."""
    nested = config.get("text_config")
    found = config.get(name, nested.get(name) if isinstance(nested, dict) else None)
    return found if isinstance(found, int) else None


def _environment() -> jinja2.Environment:
    """What chat templates expect to find (transformers' chat_template_utils)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    if not file.is_file() and not required:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(SETTING, f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(SETTING, f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigurationError(SETTING, f"{file} does not hold a JSON object")
    return found


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _read_template(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(TEMPLATE_SETTING, f"cannot read {file}: {error}") from None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        found = tokenizer_config.get(name)
        text = found.get("content") if isinstance(found, dict) else found
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingDefaults(
        **{name: generation_config[name] for name in known if generation_config.get(name) is not None}
    )
