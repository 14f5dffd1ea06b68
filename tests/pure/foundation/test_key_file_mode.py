"""Who may read a key file."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import ConfigurationError
from foundation.keys import draw_master_keys, is_open_to_others, read_key_file, write_key_file

ROOT, US = 0, 10001


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_a_key_of_our_own_is_ours_alone(mode: int) -> None:
    assert not is_open_to_others(0o600, US, US)
    assert is_open_to_others(mode, US, US)


def test_a_key_of_roots_may_reach_us_through_our_group_as_kubernetes_hands_out_secrets() -> None:
    assert not is_open_to_others(0o440, ROOT, US)
    assert not is_open_to_others(0o640, ROOT, US)


@pytest.mark.parametrize("mode", [0o444, 0o644, 0o660, 0o650])
def test_a_key_of_roots_that_others_could_read_or_its_group_could_change_is_refused(mode: int) -> None:
    assert is_open_to_others(mode, ROOT, US)


def test_root_itself_needs_no_group() -> None:
    assert is_open_to_others(0o640, ROOT, ROOT)


def test_a_file_that_others_may_read_is_refused_by_name_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_key_file(path, draw_master_keys())
    read_key_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"keys is open to others \(mode 0644\); chmod 600 it"):
        read_key_file(path)
