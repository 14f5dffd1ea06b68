"""The next block for running sequences: decodes go first, and the oldest of them first.

When the pool is empty the latest request that recompute can replace gives way. A sequence that is the latest itself stays out
of this step but keeps what it holds: everybody older takes it when they need it. Its seat is different: nobody takes a seat,
so it gives way when an older one that holds blocks waits for a seat.
"""

from __future__ import annotations

from engine.request import Request
from engine.scheduler.state import State, add_blocks, missing_blocks, preempt


def grow(state: State) -> None:
    """Give blocks to every seat that lacks some, as far as they go. Who still lacks them is left out of the plan."""
    seats = state.seats
    coming = state.pool.settling
    for seat in seats.by_arrival(seats.lacking_blocks()):
        request = seats.requests[seat]
        # A seat may have been emptied for an older one just now.
        while request is not None and request.seat == seat and not add_blocks(state, request):
            lacking = missing_blocks(state, request) - state.pool.available
            if lacking <= coming:
                coming -= lacking  # the end of a launched step brings them
                state.skips["blocks_settling"] += 1
                break
            victim = _latest(state)
            if victim is request and state.ready.first is None:
                state.skips["no_free_blocks"] += 1
                break
            settling = state.pool.settling
            preempt(state, victim)
            coming += state.pool.settling - settling


def _latest(state: State) -> Request:
    """The latest arrival among those that hold blocks and may be preempted."""
    running, ready = state.seats.latest_preemptible(), state.ready.last
    if running is None or (ready is not None and ready.arrival > running.arrival):
        assert ready is not None, "a sequence lacks a block, so somebody may be preempted"
        return ready
    return running
