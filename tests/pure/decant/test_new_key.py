"""`decant new-key` draws a key once and never replaces one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from decant.command_line import run
from foundation.keys import MasterKeys, read_key_file


def test_a_key_is_drawn_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "master.key"
    assert run(["new-key", str(path)], {}) == 0
    keys = read_key_file(path)
    assert isinstance(keys, MasterKeys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert capsys.readouterr().out == f"{path} written\n"


def test_a_key_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "master.key"
    run(["new-key", str(path)], {})
    before = path.read_bytes()
    capsys.readouterr()
    assert run(["new-key", str(path)], {}) == 0
    assert path.read_bytes() == before
    assert capsys.readouterr().out == f"{path} is there already\n"


def test_something_else_in_its_place_is_named_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "master.key"
    path.write_text("no key\n")
    path.chmod(0o600)
    assert run(["new-key", str(path)], {}) == 2
    assert "line 1 is not `master|node <kid>" in capsys.readouterr().err
    assert path.read_text() == "no key\n"


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--force"]])
def test_anything_but_one_file_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new-key", *arguments], {}) == 2
    assert "decant new-key: FILE: one file is wanted" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new-key", str(tmp_path / "nowhere" / "master.key")], {}) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
