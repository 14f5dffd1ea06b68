"""Further choices of one prompt: they read the KV that the first of them got, whose whole blocks they share and whose last,
partial block they copy.

A fork waits outside all lines until that KV stands, then in line like everybody else. Where the other request has ended, lost its
blocks or is of another prompt, nothing is shared and the prompt is computed as any other (the prefix cache helps).

Must not know: torch, where the KV came from.
"""

from __future__ import annotations

from engine.request import Request, Stage
from engine.scheduler.state import State, leave, take_shared, wait


def release_forks(state: State) -> None:
    """Let those join the line whose prompt's KV stands, or will come from nobody."""
    for request in list(state.forking):
        source = state.requests.get(request.fork_of) if request.fork_of is not None else None
        if source is None or _standing(state, source) >= _shared_positions(request):
            leave(state, request)
            wait(state, request)


def fork_source(state: State, request: Request) -> Request | None:
    """The request whose blocks hold the KV of this one's prompt now."""
    source = state.requests.get(request.fork_of) if request.fork_of is not None else None
    shared = _shared_positions(request)
    if source is None or _standing(state, source) < shared or source.history[:shared] != request.history[:shared]:
        return None
    being_copied = {to for _, to in state.block_copies}
    return None if being_copied.intersection(source.blocks) else source


def take_forked(state: State, request: Request, source: Request) -> bool:
    """Blocks for the whole history, which begin with the KV of the source's prompt; or nothing."""
    shared = _shared_positions(request)
    whole, rest = divmod(shared, state.config.block_size)
    if not take_shared(state, request, source.blocks[:whole], len(request.history)):
        return False
    if rest:
        state.block_copies.append((source.blocks[whole], request.blocks[whole]))
    request.cached = request.computed = shared
    request.fork_of = None
    return True


def _shared_positions(request: Request) -> int:
    """Of the prompt; but the last position of the history is computed, for its logits are wanted."""
    return min(request.rules.prompt_length, len(request.history) - 1)


def _standing(state: State, source: Request) -> int:
    """Positions whose KV stands in the source's blocks and that no transfer writes."""
    match source.stage:
        case Stage.RUNNING:
            return int(state.seats.computed[source.seat])
        case Stage.READY:
            return source.computed
        case _:
            return 0
