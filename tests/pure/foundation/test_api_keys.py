"""API keys: shown once, kept as salted digests, taken back at once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.api_keys import LONGEST_KEY, ApiKeyStore, Scope, add_api_key, read_api_keys, remove_api_key
from foundation.errors import ConfigurationError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_is_found_by_what_was_shown_and_by_nothing_else(path: Path) -> None:
    first, second = add_api_key(path, "team-a", Scope.INFERENCE), add_api_key(path, "ops", Scope.ADMIN)
    keys = read_api_keys(path)
    found = [keys.find(presented) for presented in (first, second, first[:-1], first + "x", "", second.upper())]
    assert [key and (key.name, key.scope) for key in found] == [
        ("team-a", Scope.INFERENCE),
        ("ops", Scope.ADMIN),
        *[None] * 4,
    ]


def test_the_file_is_private_and_tells_no_key(path: Path) -> None:
    key = add_api_key(path, "team-a", Scope.INFERENCE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert key not in repr(read_api_keys(path))
    assert list(path.parent.iterdir()) == [path], "nothing is left of the writing"


def test_one_key_twice_has_two_digests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.api_keys.draw_api_key", lambda: "decant-the-same-key-every-time")
    add_api_key(path, "a", Scope.INFERENCE)
    add_api_key(path, "b", Scope.INFERENCE)
    first, second = read_api_keys(path).keys
    assert first.digest != second.digest


def test_a_store_takes_new_keys_and_drops_removed_ones_while_it_is_open(path: Path) -> None:
    first = add_api_key(path, "a", Scope.INFERENCE)
    store = ApiKeyStore(path)
    second = add_api_key(path, "b", Scope.INFERENCE)
    assert [key and key.name for key in (store.find(first), store.find(second))] == ["a", "b"]
    remove_api_key(path, "a")
    assert store.find(first) is None
    assert store.find(second) is not None
    remove_api_key(path, "b")
    assert store.required, "an empty file lets nobody in"
    assert store.find(second) is None


def test_a_file_that_breaks_leaves_the_last_keys_in_use(path: Path) -> None:
    key = add_api_key(path, "a", Scope.INFERENCE)
    store = ApiKeyStore(path)
    path.write_text("nonsense\n")
    assert store.find(key) is not None
    path.unlink()
    assert store.find(key) is not None


def test_a_key_of_the_environment_may_do_everything() -> None:
    store = ApiKeyStore(None, "a-key-of-some-length")
    key = store.find("a-key-of-some-length")
    assert key is not None
    assert key.scope.covers(Scope.ADMIN)
    assert not ApiKeyStore(None).required
    with pytest.raises(ConfigurationError, match="DECANT_API_KEY: must have 16 to 512 characters"):
        ApiKeyStore(None, "short")


@pytest.mark.parametrize(
    ("has", "needed", "covered"),
    [
        (Scope.INFERENCE, Scope.INFERENCE, True),
        (Scope.INFERENCE, Scope.NODE, False),
        (Scope.INFERENCE, Scope.ADMIN, False),
        (Scope.NODE, Scope.INFERENCE, False),
        (Scope.NODE, Scope.NODE, True),
        (Scope.ADMIN, Scope.NODE, True),
        (Scope.ADMIN, Scope.INFERENCE, True),
    ],
)
def test_scopes(has: Scope, needed: Scope, covered: bool) -> None:
    assert has.covers(needed) is covered


@given(st.text(max_size=LONGEST_KEY + 10))
def test_whatever_is_presented_is_no_key(presented: str) -> None:
    store = ApiKeyStore(None, "the-only-key-that-is-good")
    assert presented == "the-only-key-that-is-good" or store.find(presented) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a inference x y z\n", "line 1 is not"),
        ("# fine\n\na boss AAAA AAAA\n", "line 3 is not"),
        ("a inference AAAA AAAA\n", "line 1 is not"),
        ("\xff\n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(path: Path, text: str, problem: str) -> None:
    path.touch(mode=0o600)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=problem) as caught:
        read_api_keys(path)
    assert caught.value.setting == "--api-key-file"


def test_a_file_open_to_everybody_is_refused(path: Path) -> None:
    add_api_key(path, "a", Scope.INFERENCE)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="open to"):
        read_api_keys(path)


def test_names_are_unique_and_plain(path: Path) -> None:
    add_api_key(path, "a", Scope.INFERENCE)
    for name in ("a", "", "two words", "new\nline", "x" * 65):
        with pytest.raises(ConfigurationError, match="NAME"):
            add_api_key(path, name, Scope.INFERENCE)
    with pytest.raises(ConfigurationError, match="no key named b"):
        remove_api_key(path, "b")
