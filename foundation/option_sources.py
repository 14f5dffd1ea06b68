"""Where option values come from: command line > DECANT_* environment > --config FILE > default.

A field `max_num_seqs` is `--max-num-seqs` on the command line, `DECANT_MAX_NUM_SEQS` in the environment and `max-num-seqs`
in the file. Nothing unknown is ever ignored: it stops the start and the nearest valid name is given.

Must not know: what a value means, or whether it is right (`foundation.config`).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import yaml

from foundation.config import (
    Options,
    Setting,
    build,
    describe,
    is_derived,
    is_required,
    nearest,
    noun_of,
    option_facts,
    option_name,
    origins,
)
from foundation.errors import ConfigurationError

ENVIRONMENT_PREFIX = "DECANT_"
ALWAYS_KNOWN_VARIABLES = frozenset(
    {"DECANT_CACHE", "DECANT_CONFIG", "DECANT_TEST_FAULTS", "DECANT_API_KEY", "DECANT_ROUTER"}
)
"""No option of any process: the cache folder, the way to say --config, the faults that --enable-test-faults obeys, and what our
own clients use. An API key is no option because command lines can be read by every process of the machine."""

PASSWORD_IN_URL = re.compile(r"://[^@/:]*:[^@/]+@")

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[OptionsT]):
    options: OptionsT
    origins: Mapping[str, str]
    print_config: bool

    def describe(self) -> str:
        """Every option, its value and its origin, one a line; passwords in URLs are hidden."""
        return describe(self.options, self.origins)


def variable_name(field_name: str) -> str:
    return ENVIRONMENT_PREFIX + field_name.upper()


def parse(
    options_type: type[OptionsT],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    description: str,
    other_fields: Collection[str] = (),
) -> Parsed[OptionsT]:
    """Options of one process. `other_fields` are other processes' options: their DECANT_* variables are no typos here.

    Raises `ConfigurationError`; ends the process only for --help.
    """
    fields = {field.name: field for field in dataclasses.fields(options_type)}
    settings, print_config = gather(fields, arguments, environment, program, description, other_fields)
    return Parsed(build(options_type, settings), origins(options_type, settings), print_config)


def gather(
    fields: Mapping[str, dataclasses.Field[Any]],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    program: str,
    description: str,
    other_fields: Collection[str] = (),
) -> tuple[dict[str, Setting], bool]:
    """Every value that somebody gave for one of `fields`, the strongest source winning; and whether to print them."""
    given, config_file, print_config = _from_command_line(fields, arguments, program, description)
    from_environment = _from_environment(fields, environment, other_fields)
    config_file = config_file or environment.get("DECANT_CONFIG")
    from_file = _from_file(fields, config_file) if config_file else {}
    return {**from_file, **from_environment, **given}, print_config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        argument, _, problem = message.removeprefix("argument ").partition(": ")
        raise ConfigurationError(argument if problem else self.prog, problem or message)


def _from_command_line(
    fields: Mapping[str, dataclasses.Field[Any]], arguments: Sequence[str], program: str, description: str
) -> tuple[dict[str, Setting], str | None, bool]:
    parser = _Parser(prog=program, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file of option names and values")
    parser.add_argument(
        "--print-config", action="store_true", help="show every value and where it came from, then exit"
    )
    for name, field in fields.items():
        facts = option_facts(field)
        text = facts.help + (f" [{'|'.join(facts.choices)}]" if facts.choices else "") + _default_help(field)
        text = text.replace("%", "%%")
        if _is_switch(field):
            parser.add_argument(option_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(option_name(name), dest=name, metavar=name.rpartition("_")[2].upper(), help=text)
    known, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        _refuse_argument(unknown[0], [action for a in parser._actions for action in a.option_strings])
    values = vars(known)
    config_file = values.pop("config", None)
    print_config = values.pop("print_config", False)
    for name, value in values.items():
        if isinstance(value, str) and PASSWORD_IN_URL.search(value):
            raise ConfigurationError(
                option_name(name),
                "holds a password, which every process of this machine could read on a command line: "
                f"say it in {variable_name(name)} or in the file of --config",
            )
    return {name: Setting(value, "command line") for name, value in values.items()}, config_file, print_config


def _refuse_argument(argument: str, known: Collection[str]) -> NoReturn:
    name = argument.split("=", 1)[0]
    if not name.startswith("-"):
        raise ConfigurationError(repr(argument), "is no option; options look like --name value")
    raise ConfigurationError(name, f"unknown option{nearest(name, known)}")


def _from_environment(
    fields: Mapping[str, dataclasses.Field[Any]], environment: Mapping[str, str], other_fields: Collection[str]
) -> dict[str, Setting]:
    own = {variable_name(name): name for name in fields}
    known = {*own, *map(variable_name, other_fields), *ALWAYS_KNOWN_VARIABLES}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            raise ConfigurationError(variable, f"unknown environment variable{nearest(variable, known)}")
    return {
        name: Setting(environment[variable], f"environment {variable}")
        for variable, name in own.items()
        if variable in environment
    }


def _from_file(fields: Mapping[str, dataclasses.Field[Any]], path: str) -> dict[str, Setting]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("--config", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that no calendar has; too many brackets
        raise ConfigurationError("--config", f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError("--config", f"{path} must map option names to values, not hold a {noun_of(content)}")
    known = {name.replace("_", "-"): name for name in fields}
    settings = {}
    for key, value in content.items():
        name = known.get(str(key).replace("_", "-"))
        if name is None:
            raise ConfigurationError(f"{key} (in {path})", f"unknown option{nearest(str(key), known)}")
        settings[name] = Setting(value, f"file {path}")
    return settings


def _is_switch(field: dataclasses.Field[Any]) -> bool:
    return field.type in (bool, "bool")


def _default_help(field: dataclasses.Field[Any]) -> str:
    if is_required(field):
        return " (required)"
    if is_derived(field):
        return f" (default: {option_facts(field).derived_help})"
    return "" if field.default is None else f" (default: {field.default})"
