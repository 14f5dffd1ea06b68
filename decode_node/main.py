"""The decode node's process: an engine, the receiving half of the transfers, and the service that joins them.

Only a node's main knows both engine and transfers.
"""

from __future__ import annotations

from decode_node.service import DecodeService
from node.host import NodeParts, Role, run_node
from node.options import DecodeOptions


def run(options: DecodeOptions) -> int:
    """Serve until told to stop; the process's exit code. Raises StartError before it serves."""

    def assemble(parts: NodeParts) -> Role:
        service = DecodeService(
            parts.engine.post, parts.ready.config, parts.ready.parts.fingerprint.vocabulary_size, parts.metrics
        )
        return Role(service, start=_nothing, stop=_nothing, epoch=lambda: 0)

    return run_node(options, assemble)


async def _nothing() -> None:
    pass
