"""Which tokens the rows of a step may draw whose answers follow a grammar. Such a row is planned only when every token before
it is known, so its grammar has seen them all.

Must not know: torch, pools, lines.
"""

from __future__ import annotations

import numpy as np

from engine.scheduler.seats import Seats
from engine.step import Int64, TokenMasks


def token_masks(seats: Seats, drawing: Int64) -> TokenMasks | None:
    """For the seats `drawing`, which draw in this order."""
    rows = np.flatnonzero(seats.constrained[drawing])
    if not len(rows):
        return None
    requests = [seats.request(int(drawing[row])) for row in rows]
    grammars = [request.grammar for request in requests if request.grammar is not None]
    words = np.zeros((len(rows), grammars[0].words), np.int32)
    for index, (request, grammar) in enumerate(zip(requests, grammars, strict=True)):
        grammar.follow(request.history[request.rules.prompt_length :])
        grammar.fill(words, index)
    return TokenMasks(rows, words)
