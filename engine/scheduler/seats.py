"""The batch as a struct of arrays: one row a seat, so that decode steps are planned and settled by indexing.

Of a seated request, these arrays are the truth about its progress:

    computed <= scheduled <= length <= max_length

`computed`: positions whose KV has settled; `scheduled`: those launched as well; `length`: tokens of its history, the one
that a launched step is drawing included. One position left to schedule is a decode, more are a prefill, whatever the
request's past. An empty seat has length 0 and matches neither.

Must not know: pools, lines, plans.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.kv_cache.block_table import BlockTable
from engine.port import Mode
from engine.request import Request, Stage

Int64 = npt.NDArray[np.int64]

NOT_SEATED = -1


class Seats:
    def __init__(self, config: EngineConfig) -> None:
        count = config.max_num_seqs
        self.table = BlockTable(count, config.max_blocks_per_sequence, config.block_size)
        self.requests: list[Request | None] = [None] * count
        self._empty = list(range(count - 1, -1, -1))
        self.stays = 0
        self.stay = np.zeros(count, np.int64)
        """Which stay of which request this is; never reused, so that a late result finds out that it is late."""
        self.arrival = np.full(count, NOT_SEATED, np.int64)
        self.preemptible = np.zeros(count, np.bool_)
        self.computed = np.zeros(count, np.int64)
        self.scheduled = np.zeros(count, np.int64)
        self.length = np.zeros(count, np.int64)
        self.max_length = np.zeros(count, np.int64)
        self.min_length = np.zeros(count, np.int64)
        """Below this length no stop token may be drawn."""
        self.named_blocks = np.zeros(count, np.int64)
        """Blocks that have been offered to the prefix index."""
        self.last_token = np.zeros(count, np.int64)
        self.drawn_in = np.zeros(count, np.int64)
        """Number of the step that draws the last token of `length`."""
        self.draw_index = np.zeros(count, np.int32)
        self.temperature = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int32)
        self.top_p = np.zeros(count, np.float32)
        self.min_p = np.zeros(count, np.float32)
        self.seed = np.zeros(count, np.uint64)
        self.choice_index = np.zeros(count, np.int32)
        self.logprobs = np.zeros(count, np.int32)
        self.constrained = np.zeros(count, np.bool_)
        """Those of which each token must be known before the next is drawn."""
        self.masked = np.zeros(count, np.bool_)
        """Those that may draw only what a grammar or a list allows."""
        self.worded = np.zeros(count, np.bool_)
        """Those that have bad words."""
        self.adjusted = np.zeros(count, np.bool_)
        """Those whose logits are biased or penalized."""
        self.scoring: set[int] = set()
        """Those of whose prompt log probabilities are still wanted."""

    @property
    def empty(self) -> int:
        return len(self._empty)

    @property
    def taken(self) -> int:
        return len(self.requests) - len(self._empty)

    def take(self, request: Request) -> None:
        seat = self._empty.pop()
        request.seat = seat
        self.requests[seat] = request
        self.stays += 1
        self.stay[seat] = self.stays
        self.table.assign(seat, request.blocks)
        sampling = request.sampling
        self.arrival[seat] = request.arrival
        self.preemptible[seat] = request.mode is not Mode.PREFILL_ONLY
        self.computed[seat] = self.scheduled[seat] = request.computed
        self.length[seat] = len(request.history)
        # A prefill node draws the first token and no other.
        draws_once = request.mode is Mode.PREFILL_ONLY
        self.max_length[seat] = request.given_length + 1 if draws_once else request.rules.max_length
        self.min_length[seat] = request.rules.prompt_length + request.rules.min_tokens
        self.named_blocks[seat] = request.computed // self.table.block_size
        self.last_token[seat] = request.history[-1]
        self.drawn_in[seat] = 0
        self.temperature[seat] = sampling.temperature
        self.top_k[seat] = sampling.top_k
        self.top_p[seat] = sampling.top_p
        self.min_p[seat] = sampling.min_p
        self.seed[seat] = sampling.seed
        self.choice_index[seat] = request.choice_index
        self.logprobs[seat] = -1 if sampling.logprobs is None else sampling.logprobs
        long_words = any(len(word) > 1 for word in sampling.bad_words)
        self.constrained[seat] = request.grammar is not None or long_words
        self.masked[seat] = request.grammar is not None or bool(sampling.allowed_token_ids)
        self.worded[seat] = bool(sampling.bad_words)
        self.adjusted[seat] = bool(sampling.logit_bias) or sampling.penalizes
        if request.unscored:
            self.scoring.add(seat)
        request.stage = Stage.RUNNING

    def leave(self, request: Request) -> None:
        seat = request.seat
        assert self.requests[seat] is request, f"{request.key} does not sit in seat {seat}"
        self.requests[seat] = None
        request.seat = NOT_SEATED
        self._empty.append(seat)
        self.scoring.discard(seat)
        self.stay[seat] = 0
        self.arrival[seat] = NOT_SEATED
        self.preemptible[seat] = False
        self.length[seat] = self.scheduled[seat] = self.computed[seat] = self.max_length[seat] = 0

    def request(self, seat: int) -> Request:
        request = self.requests[seat]
        assert request is not None, f"seat {seat} is empty"
        return request

    def by_arrival(self, mask: npt.NDArray[np.bool_]) -> list[int]:
        """Seats under the mask, oldest request first."""
        seats = np.flatnonzero(mask)
        return [] if not len(seats) else seats[np.argsort(self.arrival[seats])].tolist()

    def lacking_blocks(self) -> npt.NDArray[np.bool_]:
        """Seats whose history no longer fits their blocks and that have a token to draw."""
        return (self.length > self.table.counts * self.table.block_size) & (self.length < self.max_length)

    def left(self) -> Int64:
        """Positions that may be scheduled, by seat: none where the last token is being drawn or blocks are lacking."""
        drawn_out = self.length >= self.max_length
        return np.where(drawn_out | self.lacking_blocks(), 0, self.length - self.scheduled)

    def prompt_positions_left(self) -> int:
        """Positions left of sequences that are not decoding."""
        left = self.left()
        return int(left[left > 1].sum())

    def latest_preemptible(self) -> Request | None:
        seat = int(np.argmax(np.where(self.preemptible, self.arrival, NOT_SEATED)))
        return self.requests[seat] if self.preemptible[seat] else None
