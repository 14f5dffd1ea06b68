"""How options are declared, checked together and frozen; where their values come from is `foundation.option_sources`.

A process declares its options as one frozen dataclass derived from `Options`, each field made by `option` or `derived`.
Building it checks each value and then all of them together: an instance that exists is valid, in tests as well.

Must not know: what any option means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from foundation.errors import ConfigurationError

DEFAULT_ORIGIN = "default"

_REQUIRED: Any = object()
_DERIVED: Any = object()


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """What a field's metadata says about its option."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    sized: bool = False
    """An integer that may be written 8k, 4K, 512MiB."""
    derive: Callable[[Any], Any] | None = None
    derived_help: str = ""


def option(
    default: Any = _REQUIRED,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    sized: bool = False,
) -> Any:
    """A field with a fixed default, or a required one. Limits are inclusive."""
    facts = OptionFacts(help, minimum, maximum, choices, sized)
    return dataclasses.field(default=default, kw_only=True, metadata={"option": facts})


def derived(derive: Callable[[Any], Any], derived_help: str, help: str, **limits: Any) -> Any:
    """A field whose default is computed from the other fields; `derived_help` says how, for --help."""
    facts = OptionFacts(help, derive=derive, derived_help=derived_help, **limits)
    return dataclasses.field(default=_DERIVED, kw_only=True, metadata={"option": facts})


@dataclass(frozen=True)
class Options:
    """Base of every process's options. Building one raises `ConfigurationError` for the first value that is wrong."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is _REQUIRED:
                raise ConfigurationError(option_name(field.name), f"is required ({option_facts(field).help})")
        for field in dataclasses.fields(self):
            derive = option_facts(field).derive
            if derive is not None and getattr(self, field.name) is _DERIVED:
                object.__setattr__(self, field.name, derive(self))
        kinds = _field_kinds(type(self))
        for field in dataclasses.fields(self):
            _check_value(field, kinds[field.name], getattr(self, field.name))
        self.check()

    def check(self) -> None:
        """Checks across fields; raises `ConfigurationError`."""


OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as somebody gave it, and where."""

    value: Any
    origin: str


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def field_names(options_type: type[Options]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(options_type))


def build(options_type: type[OptionsT], settings: Mapping[str, Setting], **decided: Any) -> OptionsT:
    """An instance from those settings that are its fields. `decided` values, already typed, override them."""
    kinds = _field_kinds(options_type)
    values = {
        field.name: _convert(field, kinds[field.name], settings[field.name])
        for field in dataclasses.fields(options_type)
        if field.name in settings and field.name not in decided
    }
    return options_type(**values, **decided)


def origins(options_type: type[Options], settings: Mapping[str, Setting]) -> dict[str, str]:
    return {name: settings[name].origin if name in settings else DEFAULT_ORIGIN for name in field_names(options_type)}


def describe(options: Options, origins: Mapping[str, str]) -> str:
    values = {option_name(name): _hide_password(getattr(options, name)) for name in field_names(type(options))}
    width = max(len(name) for name in values)
    value_width = max(len(value) for value in values.values())
    return "\n".join(
        f"{name:<{width}}  {value:<{value_width}}  {origin}"
        for (name, value), origin in zip(values.items(), origins.values(), strict=True)
    )


def to_arguments(options: Options) -> list[str]:
    """A command line that builds an equal instance in another process."""
    arguments = []
    for name in field_names(type(options)):
        value = getattr(options, name)
        if isinstance(value, bool):
            arguments.append(option_name(name) if value else "--no-" + option_name(name)[2:])
        elif value is not None:
            arguments.append(f"{option_name(name)}={value}")
    return arguments


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean X?`, or nothing when no known name comes close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# From what was written to a typed value, and its checks.

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def _convert(field: dataclasses.Field[Any], kind: Any, setting: Setting) -> Any:
    value, optional = setting.value, _is_optional(kind)
    if value is None and optional:
        return None
    kind = _plain_kind(kind)
    name = option_name(field.name)
    where = f" (from {setting.origin})"
    if isinstance(value, (dict, list)) or value is None:
        raise ConfigurationError(name, f"must be a single value, not a {noun_of(value)}{where}")
    if isinstance(value, bool) and kind is not bool:
        raise ConfigurationError(name, f"must be a {_noun_of_kind(kind)}, not {str(value).lower()}{where}")
    text = str(value).strip()
    try:
        return _read(kind, text, option_facts(field).sized)
    except ValueError:
        raise ConfigurationError(name, f"{text!r} is not a {_noun_of_kind(kind)}{where}") from None


def _read(kind: Any, text: str, sized: bool) -> Any:
    """Raises ValueError when `text` does not spell a value of this kind."""
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError
    if kind is int:
        match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?) ?([A-Za-z]*)", text) if sized else None
        if match is None:
            return int(text)
        number, unit = match.groups()
        if unit not in _SIZES:
            raise ValueError
        size = float(number) * _SIZES[unit] if "." in number else int(number) * _SIZES[unit]
        if size != int(size):
            raise ValueError
        return int(size)
    return kind(text)


def _check_value(field: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    name, facts = option_name(field.name), option_facts(field)
    if value is None and _is_optional(kind):
        return
    plain = _plain_kind(kind)
    accepted = (int, float) if plain is float else plain
    if not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool):
        raise ConfigurationError(name, f"must be a {_noun_of_kind(plain)}, not {value!r}")
    if facts.choices and value not in facts.choices:
        raise ConfigurationError(
            name, f"{value!r} is not one of {', '.join(facts.choices)}{nearest(str(value), facts.choices)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(name, f"must be finite, not {value}")
    if facts.minimum is not None and value < facts.minimum:
        raise ConfigurationError(name, f"must be at least {_number(facts.minimum)}, not {value}")
    if facts.maximum is not None and value > facts.maximum:
        raise ConfigurationError(name, f"must be at most {_number(facts.maximum)}, not {value}")
    if isinstance(value, str) and not value.strip():
        raise ConfigurationError(name, "must not be empty")


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is _REQUIRED


def is_derived(field: dataclasses.Field[Any]) -> bool:
    return field.default is _DERIVED


def option_facts(field: dataclasses.Field[Any]) -> OptionFacts:
    facts = field.metadata["option"]
    assert isinstance(facts, OptionFacts), f"{field.name} was not made by option() or derived()"
    return facts


def _field_kinds(options_type: type[Options]) -> dict[str, Any]:
    return typing.get_type_hints(options_type)


def _is_optional(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _plain_kind(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (argument for argument in typing.get_args(kind) if argument is not type(None))
    return kind


def _noun_of_kind(kind: Any) -> str:
    return {int: "whole number", float: "number", bool: "truth value (true or false)", str: "text"}[kind]


def noun_of(value: Any) -> str:
    return {dict: "mapping", list: "list", type(None): "empty value"}.get(type(value), "single value")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _hide_password(value: Any) -> str:
    return re.sub(r"://[^@/]*@", "://***@", str(value))
