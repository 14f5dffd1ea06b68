"""What clients ask of a simulated cluster, and what they got: the real fleet and dispatcher, without a front end.

A client leaves when its time has come, wherever its request stands then. Every answer is compared with the oracle's, token by
token, whatever happened on the way.

Must not know: faults, nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cluster_books import Books
from cluster_clock import Process
from cluster_engine import SEEDED_TEMPERATURE, VOCABULARY_SIZE, oracle

from engine.config import EngineConfig
from engine.port import FinishReason, SamplingParameters
from foundation.background import Background
from foundation.kv_layout import KvLayout
from foundation.metrics import RouterMetrics
from router.answer import Piece
from router.dispatch import Dispatcher, Limits
from router.fleet import Fleet
from router.generation import Generation, RequestRefused, Sampling
from router.text import AnyDetokenizer, Detokenizer

DEADLINE_S = 120.0
METRICS = RouterMetrics()
SLACK_S = 1.0
"""A request that is past its deadline has ended after so long."""


@dataclass(frozen=True)
class Wish:
    """One request: when, what, and how patient its client is. `leaves_after_s` None: it stays to the end."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    sampling: SamplingParameters
    deadline_s: float
    leaves_after_s: float | None


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    finish: str = ""
    failure: str = ""
    left: bool = False


class PlainText:
    """Stands in for the tokenizer: one letter a token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> AnyDetokenizer:
        return Detokenizer(self.decode, context)


def draw_wishes(
    rng: random.Random, count: int, within_s: float, longest: int, crowded_s: Sequence[float]
) -> list[Wish]:
    """Prompts share beginnings, so that prefixes are found cached; some clients leave, some deadlines are short. Most come
    shortly before one of the times `crowded_s`."""
    stems = [tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(longest)) for _ in range(3)]
    wishes = []
    for number in range(count):
        at_s = rng.uniform(0, within_s)
        if crowded_s and rng.random() < 0.7:
            at_s = max(0.0, rng.choice(crowded_s) + rng.uniform(-0.6, 0.3))
        length = rng.randint(1, longest)
        shared = rng.randint(0, length)
        own = tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(length - shared))
        max_tokens = rng.choice((1, 2, 4, 8, 16, 24))
        sampling = SamplingParameters(
            seed=rng.getrandbits(64),
            max_tokens=max_tokens,
            temperature=rng.choice((0.0, SEEDED_TEMPERATURE)),
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < 0.3,
        )
        wishes.append(
            Wish(
                name=f"r{number}",
                at_s=at_s,
                prompt=rng.choice(stems)[:shared] + own,
                sampling=sampling,
                deadline_s=rng.uniform(0.05, 4.0) if rng.random() < 0.08 else DEADLINE_S,
                leaves_after_s=rng.uniform(0.0, 1.5) if rng.random() < 0.15 else None,
            )
        )
    return wishes


class Clients:
    """The router's process and all its clients."""

    def __init__(self, process: Process, fleet: Fleet, books: Books, layout: KvLayout, config: EngineConfig) -> None:
        self.process = process
        self.answers: dict[str, Answer] = {}
        self.unfinished = 0
        self._books = books
        self._layout, self._config = layout, config
        self._fleet = fleet
        self.dispatcher: Dispatcher

    def start(self, wishes: Sequence[Wish]) -> None:
        """Called in the router's process."""
        loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(self._fleet, PlainText(), METRICS, Limits(1000), loop.time)  # type: ignore[arg-type]
        self._fleet.start(self.dispatcher, Background(lambda failure: self._books.violated(f"the router: {failure!r}")))
        self.unfinished = len(wishes)
        self._tasks = [loop.create_task(self._live(wish), name=wish.name) for wish in wishes]

    async def _live(self, wish: Wish) -> None:
        await asyncio.sleep(wish.at_s)
        answer = self.answers[wish.name] = Answer()
        began_s = self._books.loop.now_s
        try:
            async with asyncio.timeout(wish.leaves_after_s):
                await self._ask(wish, answer)
        except TimeoutError:
            answer.left = True
        self._judge(wish, answer, self._books.loop.now_s - began_s)
        self.unfinished -= 1

    async def _ask(self, wish: Wish, answer: Answer) -> None:
        try:
            stream = self.dispatcher.open(_generation(wish))
        except RequestRefused as refused:
            answer.failure = refused.refusal.code or "refused"
            return
        try:
            while True:
                piece = await stream.next()
                _add(answer, piece)
                if piece.last:
                    break
        finally:
            stream.close()

    def _judge(self, wish: Wish, answer: Answer, seconds: float) -> None:
        """All that was delivered is the beginning of the oracle's answer, each token once; a finished one is all of it."""
        name, books = wish.name, self._books
        tokens, finish = expected(wish.prompt, wish.sampling, self._layout, self._config)
        first = len(wish.prompt)
        whole = list(range(first, first + len(answer.tokens)))
        books.require(answer.positions == whole, f"{name}: positions {answer.positions}, the prompt has {first}")
        books.require(answer.tokens == tokens[: len(answer.tokens)], f"{name}: {answer.tokens} for {tokens}")
        books.require(seconds <= wish.deadline_s + SLACK_S, f"{name}: took {seconds:.1f} s of {wish.deadline_s:.1f} s")
        if answer.finish:
            ended = "length" if finish is FinishReason.LENGTH else "stop"
            books.require(answer.tokens == tokens, f"{name}: finished with {answer.tokens} of {tokens}")
            books.require(answer.finish == ended, f"{name}: finished by {answer.finish}, not {ended}")
        elif not answer.left:
            due = answer.failure == "deadline" and seconds >= wish.deadline_s - 0.01
            hopeless = answer.failure == "deadline_unmeetable" and wish.deadline_s < DEADLINE_S
            books.require(due or hopeless, f"{name}: the client sees an error: {answer.failure} after {seconds:.2f} s")
        outcome = "left" if answer.left else answer.failure or answer.finish
        books.counts[f"answers {outcome}"] += 1
        books.note("client", f"{name} ends: {outcome}, {len(answer.tokens)} tokens, {seconds:.3f} s")


@lru_cache(maxsize=4096)
def expected(
    prompt: tuple[int, ...], sampling: SamplingParameters, layout: KvLayout, config: EngineConfig
) -> tuple[list[int], FinishReason]:
    return oracle(prompt, sampling, layout, config)


def _add(answer: Answer, piece: Piece) -> None:
    answer.tokens += [token.token_id for token in piece.tokens]
    answer.positions += [token.position for token in piece.tokens]
    answer.finish = piece.finish_reason or ""
    answer.failure = (piece.failure.code or "unnamed") if piece.failure else ""


def _generation(wish: Wish) -> Generation:
    wanted = wish.sampling
    sampling = Sampling(
        seed=wanted.seed,
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        min_tokens=wanted.min_tokens,
        ignore_eos=wanted.ignore_eos,
        stop_token_ids=(),
        stop=(),
        logprobs=None,
    )
    return Generation(wish.name, wish.prompt, sampling, wish.deadline_s)
