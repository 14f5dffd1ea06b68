"""`decant api-key` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from decant.command_line import run
from foundation.api_keys import ApiKeyStore


def test_a_key_is_shown_once_listed_by_name_and_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    file = f"--api-key-file={path}"
    assert run(["api-key", "add", "team-a", file], {}) == 0
    key, hint = capfd.readouterr()
    assert "team-a" in hint
    store = ApiKeyStore(path)
    assert store.find(key.strip()) is not None
    assert run(["api-key", "add", "ops", "--scope=admin"], {"DECANT_API_KEY_FILE": str(path)}) == 0
    capfd.readouterr()
    assert run(["api-key", "list", file], {}) == 0
    assert capfd.readouterr().out == "team-a inference\nops admin\n"
    assert run(["api-key", "remove", "team-a", file], {}) == 0
    assert store.find(key.strip()) is None


def test_what_is_wrong_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = f"--api-key-file={tmp_path / 'keys'}"
    for arguments in (["remove", "nobody"], ["add", "two words"], ["list"]):
        assert run(["api-key", *arguments, file], {}) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
