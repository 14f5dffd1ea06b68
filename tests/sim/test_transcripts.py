"""Every transcript in tests/transcripts is what the machines say today (`make transcripts` rewrites them)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transcripts import FOLDER, replay

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_machines_still_say_this(path: Path) -> None:
    text = path.read_text()
    assert replay(text) == text
    assert "rest: yes" in text


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 12
