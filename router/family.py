"""The choices of one prompt (`n`), so that the prompt is computed and carried once: which of them leads, and where to.

The first that is placed leads: its decode node gets the prompt's KV, from a prefill node or by itself. Those that are placed
while it runs there follow it to the same node, which lets them share that KV. When a node is lost, whoever is placed first leads
anew. A choice that follows depends on its leader for nothing but speed: where that one is gone, the node computes the prompt.

Must not know: links, sockets, texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.placement import NodeKey


@dataclass(frozen=True, slots=True)
class Lead:
    """An attempt whose decode node has the prompt's KV, or will have it."""

    request: str
    attempt: int
    decode: NodeKey


@dataclass(slots=True, eq=False)
class Family:
    choices: int
    lead: Lead | None = None

    def lead_from(self, avoid: frozenset[str]) -> Lead | None:
        """Whom a choice may follow that would rather not go to the nodes in `avoid`."""
        return self.lead if self.lead is not None and self.lead.decode.node not in avoid else None

    def left(self, request: str) -> None:
        """The attempt of this request at its node is over."""
        if self.lead is not None and self.lead.request == request:
            self.lead = None
