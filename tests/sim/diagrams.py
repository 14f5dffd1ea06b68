"""The state diagrams in docs/protocol.md, drawn from the transition tables.

python tests/sim/diagrams.py            writes them anew; a test says when they are out of date
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kv_transfer.protocol.credit import SLOT_TRANSITIONS
from kv_transfer.protocol.decode_transfer import DECODE_TRANSITIONS
from kv_transfer.protocol.peer import PEER_TRANSITIONS
from kv_transfer.protocol.prefill_transfer import PREFILL_TRANSITIONS
from kv_transfer.protocol.sending import SENDING_TRANSITIONS

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "protocol.md"
BEGIN = "<!-- state diagrams: written by `make diagrams` from the tables -->"
END = "<!-- end of state diagrams -->"
TABLES: dict[str, Mapping[Any, Any]] = {
    "A transfer on D": DECODE_TRANSITIONS,
    "A transfer on P": PREFILL_TRANSITIONS,
    "A slot of D": SLOT_TRANSITIONS,
    "A sending slot of P": SENDING_TRANSITIONS,
    "A peer": PEER_TRANSITIONS,
}


def diagrams() -> str:
    return "\n\n".join(f"{title}:\n\n{_diagram(table)}" for title, table in TABLES.items())


def _diagram(table: Mapping[Any, Any]) -> str:
    """Moves from state to state, with what causes them; what leaves a state as it is is not drawn."""
    causes: dict[tuple[str, str], list[str]] = {}
    for (state, step), target in table.items():
        if target is not state:
            causes.setdefault((state.name, target.name), []).append(_name(step))
    lines = [f"    {source} --> {target}: {', '.join(sorted(names))}" for (source, target), names in causes.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _name(step: Any) -> str:
    return step.name.lower() if isinstance(step, Enum) else step.__name__


def redrawn(document: str) -> str:
    """The document with today's diagrams."""
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{diagrams()}\n\n{END}{after}"


def main() -> int:
    DOCUMENT.write_text(redrawn(DOCUMENT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
