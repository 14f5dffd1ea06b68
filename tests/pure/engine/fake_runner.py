"""A fake runner with a real pool of KV: each slot keeps a hash of (token, position), and a drawn token is a hash of the KV
that the row's block table leads to. One wrong slot, block, token or position changes the text.

Like a device it runs launched steps late: not before their results are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.step import StepPlan, StepResult

VOCABULARY = 23


def kv_of(token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed = token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed ^ positions.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)


def draw(kv: npt.NDArray[np.uint64], banned: frozenset[int]) -> int:
    digest = blake2b(kv.tobytes(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def next_token(history: Sequence[int], banned: frozenset[int] = frozenset()) -> int:
    """The token that follows this history: what any run of any schedule must draw."""
    return draw(kv_of(np.array(history, np.int64), np.arange(len(history))), banned)


class FakeRunner:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kv = np.zeros(config.capacity_positions, np.uint64)
        self.owner_words = np.zeros(config.num_blocks, np.uint64)
        self.launched: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.closed = False

    def launch(self, plan: StepPlan) -> FakeStep:
        assert not self.closed
        assert plan.number == len(self.launched) + 1
        assert 0 < plan.tokens <= self.config.max_num_batched_tokens
        assert plan.rows <= self.config.max_num_seqs
        assert len(set(plan.slot_mapping.tolist())) == plan.tokens, "two tokens write one slot"
        assert plan.query_start[-1] == plan.tokens
        assert np.array_equal(plan.positions[plan.query_start[1:] - 1] + 1, plan.context_lengths)
        for array, dtype in ((plan.token_ids, np.int64), (plan.feedback, np.int32), (plan.slot_mapping, np.int64)):
            assert array.dtype == dtype
        self.launched.append(plan)
        return FakeStep(self, plan.number)

    def run_up_to(self, number: int) -> None:
        while len(self.results) < number:
            plan = self.launched[len(self.results)]
            for source, target in plan.block_copies.tolist():
                whole = (0, self.config.block_size)
                self.kv[self.slots([target], *whole)] = self.kv[self.slots([source], *whole)]
            previous = self.results[-1].token_ids if self.results else np.zeros(0, np.int64)
            token_ids = plan.token_ids.copy()
            fed = plan.feedback >= 0
            token_ids[fed] = previous[plan.feedback[fed]]
            self.kv[plan.slot_mapping] = kv_of(token_ids, plan.positions)
            self.results.append(StepResult(np.array(self._draws(plan), np.int64)))

    def _draws(self, plan: StepPlan) -> list[int]:
        drawn = []
        for sample, token in enumerate(plan.sample_tokens.tolist()):
            row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
            kv = self.read(plan.block_tables[row].tolist(), int(plan.context_lengths[row]))
            assert plan.sampling.position[sample] == plan.context_lengths[row]
            drawn.append(draw(kv, frozenset(i for r, i in plan.sampling.banned if r == sample)))
        return drawn

    def slots(self, blocks: Sequence[int], start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        table = np.array(blocks, np.int64)
        return table[positions // self.config.block_size] * self.config.block_size + positions % self.config.block_size

    def read(self, blocks: Sequence[int], end: int) -> npt.NDArray[np.uint64]:
        return self.kv[self.slots(blocks, 0, end)]

    def close(self) -> None:
        self.closed = True


class FakeStep:
    def __init__(self, runner: FakeRunner, number: int) -> None:
        self.runner, self.number = runner, number

    def layers_written(self) -> Iterable[int]:
        return ()

    def result(self) -> StepResult:
        self.runner.run_up_to(self.number)
        return self.runner.results[self.number - 1]
