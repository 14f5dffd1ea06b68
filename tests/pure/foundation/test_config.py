"""Options: four sources and their order, nothing unknown ignored, every wrong value named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.config import Options, derived, option, to_arguments
from foundation.errors import ConfigurationError
from foundation.option_sources import Parsed, parse


@dataclass(frozen=True)
class Example(Options):
    name: str = option(help="what it is called")
    count: int = option(4, "how many", minimum=1, maximum=9)
    size_bytes: int = option(1024, "how large", sized=True)
    ratio: float = option(0.5, "how much", minimum=0)
    colour: str = option("red", "which colour", choices=("red", "green"))
    enable_feature: bool = option(True, "whether")
    limit: int | None = option(None, "at most")
    twice: int = derived(lambda options: 2 * options.count, "2 x count", "twice the count")

    def check(self) -> None:
        if self.limit is not None and self.limit < self.count:
            raise ConfigurationError("--limit", f"must be at least --count ({self.count})")


def parsed(*arguments: str, environment: Mapping[str, str] | None = None) -> Parsed[Example]:
    return parse(Example, arguments, environment or {}, program="example", description="", other_fields=["other_thing"])


def refusal(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parsed(*arguments, environment=environment)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "example.yaml"


def test_the_command_line_beats_the_environment_which_beats_the_file_which_beats_the_default(config_file: Path) -> None:
    config_file.write_text("name: from-file\ncount: 2\nratio: 2\nlimit: 8\n")
    environment = {"DECANT_NAME": "from-environment", "DECANT_COUNT": "3"}
    result = parsed("--config", str(config_file), "--name=from-command-line", environment=environment)
    assert (result.options.name, result.options.count, result.options.limit) == ("from-command-line", 3, 8)
    assert (result.options.ratio, result.options.colour) == (2.0, "red")
    assert result.origins["name"] == "command line"
    assert result.origins["count"] == "environment DECANT_COUNT"
    assert result.origins["limit"] == f"file {config_file}"
    assert result.origins["colour"] == "default"


def test_the_environment_can_name_the_file(config_file: Path) -> None:
    config_file.write_text("name: from-file\n")
    assert parsed(environment={"DECANT_CONFIG": str(config_file)}).options.name == "from-file"


def test_options_are_frozen() -> None:
    options = parsed("--name=x").options
    with pytest.raises(FrozenInstanceError):
        options.count = 5  # type: ignore[misc]


def test_a_derived_default_follows_the_other_options_and_can_be_overridden() -> None:
    assert parsed("--name=x", "--count=3").options.twice == 6
    assert parsed("--name=x", "--count=3", "--twice=7").options.twice == 7


@pytest.mark.parametrize(
    ("written", "bytes_meant"),
    [("512", 512), ("8k", 8000), ("8K", 8192), ("1.5MiB", 1572864), ("2 GiB", 2**31), ("3MB", 3_000_000)],
)
def test_sizes_may_carry_units(written: str, bytes_meant: int) -> None:
    assert parsed("--name=x", "--size-bytes", written).options.size_bytes == bytes_meant


def test_a_switch_is_turned_off_by_its_no_form_and_by_the_environment() -> None:
    assert parsed("--name=x", "--no-enable-feature").options.enable_feature is False
    assert parsed("--name=x", environment={"DECANT_ENABLE_FEATURE": "off"}).options.enable_feature is False


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    assert refusal("--name=x", "--cuont=3") == "--cuont: unknown option; did you mean --count?"


def test_an_abbreviated_option_is_refused() -> None:
    assert "--coun: unknown option" in refusal("--name=x", "--coun=3")


def test_an_unknown_variable_is_refused_with_the_nearest_one() -> None:
    message = refusal("--name=x", environment={"DECANT_COUNTS": "3"})
    assert message == "DECANT_COUNTS: unknown environment variable; did you mean DECANT_COUNT?"


def test_another_processes_variable_is_no_typo() -> None:
    assert parsed("--name=x", environment={"DECANT_OTHER_THING": "3", "PATH": "/bin"}).options.name == "x"


def test_an_unknown_key_of_the_file_is_refused_with_the_file_and_the_nearest_key(config_file: Path) -> None:
    config_file.write_text("name: x\nsize-byte: 3\n")
    message = refusal("--config", str(config_file))
    assert message == f"size-byte (in {config_file}): unknown option; did you mean size-bytes?"


WRONG_SHAPES = [
    "[1, 2]",
    "a: b: c",
    "just text",
    "count: [1]",
    "count: {a: 1}",
    "count: true",
    "count: 2001-99-99",
    "[" * 5000,
]


@pytest.mark.parametrize("content", WRONG_SHAPES)
def test_a_file_of_the_wrong_shape_is_refused(config_file: Path, content: str) -> None:
    config_file.write_text(content)
    message = refusal("--name=x", "--config", str(config_file))
    assert str(config_file) in message


def test_a_missing_file_is_refused() -> None:
    assert refusal("--name=x", "--config=/nowhere.yaml").startswith("--config: cannot read /nowhere.yaml")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--count=two", "--count: 'two' is not a whole number (from command line)"),
        ("--count=2.5", "--count: '2.5' is not a whole number (from command line)"),
        ("--count=0", "--count: must be at least 1, not 0"),
        ("--count=10", "--count: must be at most 9, not 10"),
        ("--ratio=nan", "--ratio: must be finite, not nan"),
        ("--ratio=-0.1", "--ratio: must be at least 0, not -0.1"),
        ("--size-bytes=3TiB", "--size-bytes: '3TiB' is not a whole number (from command line)"),
        ("--colour=gren", "--colour: 'gren' is not one of red, green; did you mean green?"),
        ("--name= ", "--name: must not be empty"),
        ("--limit=3", "--limit: must be at least --count (4)"),
    ],
)
def test_a_wrong_value_is_refused_naming_its_option(argument: str, message: str) -> None:
    assert refusal("--name=x", argument) == message


def test_a_required_option_is_asked_for() -> None:
    assert refusal() == "--name: is required (what it is called)"


def test_options_made_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="--count: must be at most 9"):
        Example(name="x", count=10)
    wrong_type: Any = "3"
    with pytest.raises(ConfigurationError, match="--count: must be a whole number"):
        Example(name="x", count=wrong_type)


def test_a_password_in_a_url_is_not_printed() -> None:
    text = parsed(environment={"DECANT_NAME": "redis://user:secret@host:6379/0"}).describe()
    assert "secret" not in text
    assert "redis://***@host:6379/0" in text


def test_a_password_on_a_command_line_is_refused_and_not_repeated() -> None:
    message = refusal("--name=redis://user:secret@host:6379/0")
    assert message.startswith("--name: holds a password")
    assert "DECANT_NAME" in message
    assert "secret" not in message
    assert parsed("--name=redis://user@host:6379/0").options.name == "redis://user@host:6379/0"


@given(
    count=st.integers(1, 9),
    ratio=st.floats(0, 1e9),
    enable=st.booleans(),
    limit=st.none() | st.integers(9, 99),
    name=st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1).filter(
        lambda name: bool(name.strip())
    ),
)
def test_arguments_written_for_another_process_build_equal_options(
    count: int, ratio: float, enable: bool, limit: int | None, name: str
) -> None:
    options = Example(name=name.strip(), count=count, ratio=ratio, enable_feature=enable, limit=limit)
    assert parsed(*to_arguments(options)).options == options
