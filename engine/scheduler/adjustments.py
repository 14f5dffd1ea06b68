"""What a step's plan says of the rows whose logits are biased or penalized; other rows cost one look at an array.

Must not know: torch, pools, lines.
"""

from __future__ import annotations

import numpy as np

from engine.scheduler.seats import NOT_SEATED, Seats
from engine.step import Adjustments, Int64

NO_FEEDBACK = NOT_SEATED


def adjustments(seats: Seats, drawing: Int64, settled_step: int) -> Adjustments | None:
    """For the seats `drawing`, which draw in this order; before the draw is noted in the seats."""
    asking = np.flatnonzero(seats.adjusted[drawing])
    if not len(asking):
        return None
    requests = [seats.request(int(drawing[row])) for row in asking]
    biases = [
        (int(row), token, value)
        for row, request in zip(asking, requests, strict=True)
        for token, value in request.sampling.logit_bias
    ]
    with_penalties = [index for index, request in enumerate(requests) if request.sampling.penalizes]
    rows, penalized = asking[with_penalties], [requests[index] for index in with_penalties]
    in_flight = seats.drawn_in[drawing[rows]] > settled_step
    histories = [np.frombuffer(request.history[:], np.int64) for request in penalized]
    prompts = [request.rules.prompt_length for request in penalized]
    return Adjustments(
        bias_rows=np.array([row for row, _, _ in biases], np.int64),
        bias_tokens=np.array([token for _, token, _ in biases], np.int64),
        bias_values=np.array([value for _, _, value in biases], np.float32),
        rows=rows,
        repetition=np.array([request.sampling.repetition_penalty for request in penalized], np.float32),
        presence=np.array([request.sampling.presence_penalty for request in penalized], np.float32),
        frequency=np.array([request.sampling.frequency_penalty for request in penalized], np.float32),
        feedback=np.where(in_flight, seats.draw_index[drawing[rows]], NO_FEEDBACK).astype(np.int32),
        history=np.concatenate((np.zeros(0, np.int64), *histories)),
        history_of=np.repeat(np.arange(len(penalized)), [len(history) for history in histories]),
        generated=np.concatenate(
            (
                np.zeros(0, np.bool_),
                *(np.arange(len(history)) >= start for history, start in zip(histories, prompts, strict=True)),
            )
        ),
    )
