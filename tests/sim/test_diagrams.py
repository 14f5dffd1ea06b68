"""docs/protocol.md shows the machines as they are."""

from __future__ import annotations

from diagrams import DOCUMENT, redrawn


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    document = DOCUMENT.read_text()
    assert redrawn(document) == document, "make diagrams"
