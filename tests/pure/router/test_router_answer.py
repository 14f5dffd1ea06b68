"""Pieces of an answer reach its client once and in order, whether they are pushed as they come or wait for the reader."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from decant_proto.v1 import types_pb2

from router.admission import Admission
from router.answer import AnswerStream, Piece
from router.generation import Generation, Refusal, RefusalKind, Sampling
from router.journey import Ending
from router.text import Detokenizer

SAMPLING = Sampling(
    seed=1,
    max_tokens=1000,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    min_tokens=0,
    ignore_eos=False,
    stop_token_ids=(),
    stop=("<end>",),
    logprobs=None,
)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def token(character: str, position: int) -> list[types_pb2.Token]:
    return [types_pb2.Token(position=position, token_id=ord(character))]


@dataclass
class Written:
    """Implements `Push`, and is what the client has got."""

    text: str = ""
    reads: bool = True
    pushed: int = 0

    def ready(self) -> bool:
        return self.reads

    def take(self, piece: Piece) -> None:
        assert not piece.last
        self.pushed += 1
        self.text += piece.text


@dataclass
class Reader:
    """What an endpoint does: the first piece is written by itself, then pieces are pushed."""

    stream: AnswerStream
    written: Written = field(default_factory=Written)
    last: Piece | None = None

    async def read(self) -> None:
        while True:
            piece = await self.stream.next()
            self.written.text += piece.text
            self.stream.push = self.written
            if piece.last:
                self.last = piece
                return


def new_stream(stopped: list[str]) -> AnswerStream:
    generation = Generation("r", (1, 2), SAMPLING, 60.0)
    return AnswerStream(
        generation, Detokenizer(letters), lambda: stopped.append("stop"), lambda: stopped.append("left")
    )


@pytest.mark.parametrize("seed", range(30))
async def test_pieces_come_once_and_in_order_whether_the_client_reads_or_not(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choices("abcdefgh", k=200))
    stream = new_stream([])
    reader = Reader(stream)
    reading = asyncio.create_task(reader.read())
    for position, character in enumerate(text):
        reader.written.reads = chance.random() < 0.7
        stream.deliver_one(token(character, position))
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    stream.finish(Ending.LENGTH)
    await reading
    assert reader.written.text == text
    assert reader.written.pushed > 10
    assert reader.last is not None
    assert reader.last.finish_reason == "length"
    assert stream.completion_tokens == len(text)


async def test_a_stop_string_that_is_complete_in_a_pushed_piece_ends_the_answer() -> None:
    stopped: list[str] = []
    stream = new_stream(stopped)
    reader = Reader(stream)
    reading = asyncio.create_task(reader.read())
    for position, character in enumerate("some text<end>"):
        stream.deliver_one(token(character, position))
        await asyncio.sleep(0)
    await asyncio.wait_for(reading, 1)
    assert stopped == ["stop"]
    assert reader.written.text == "some text"
    assert reader.last is not None
    assert (reader.last.finish_reason, reader.last.stop_reason) == ("stop", "<end>")


def failure() -> Refusal:
    return Refusal(RefusalKind.UNAVAILABLE, "lost", code="lost")


@pytest.mark.parametrize("end", [lambda stream: stream.finish(Ending.LENGTH), lambda stream: stream.fail(failure())])
async def test_f20_a_stop_string_in_what_came_with_the_end_is_the_end_and_known_at_once(
    end: Callable[[AnswerStream], None],
) -> None:
    stopped: list[str] = []
    stream = new_stream(stopped)
    for position, character in enumerate("some<end>more"):
        stream.deliver(token(character, position))
    end(stream)
    assert stream.finish_reason == "stop", "whoever counts need not wait for a client to read"
    piece = await stream.next()
    assert (piece.text, piece.finish_reason, piece.stop_reason, piece.failure) == ("some", "stop", "<end>", None)
    assert stopped == [], "nobody computes any more"


async def test_a_failure_keeps_the_text_before_it_and_a_second_end_changes_nothing() -> None:
    stream = new_stream([])
    stream.deliver(token("a", 0))
    stream.fail(failure())
    stream.finish(Ending.LENGTH)
    stream.fail(Refusal(RefusalKind.INTERNAL, "later"))
    piece = await stream.next()
    assert (piece.text, piece.failure, stream.finish_reason) == ("a", failure(), None)


async def test_f28_what_fails_in_an_answers_text_at_its_end_ends_its_reader_and_nobody_else() -> None:
    def broken(token_ids: Sequence[int]) -> str:
        raise LookupError("a bug")

    stream = AnswerStream(Generation("r", (1, 2), SAMPLING, 60.0), Detokenizer(broken), lambda: None, lambda: None)
    stream.deliver(token("a", 0))
    stream.finish(Ending.LENGTH)  # on the stream of a node, which goes on
    assert stream.finish_reason is None
    with pytest.raises(LookupError, match="a bug"):
        await stream.next()


async def test_f28_what_fails_while_a_piece_is_pushed_ends_its_reader_and_nobody_else() -> None:
    class Failing(Written):
        def take(self, piece: Piece) -> None:
            raise LookupError("a bug")

    stream = new_stream([])
    reading = asyncio.create_task(Reader(stream, Failing()).read())
    for position, character in enumerate("some"):
        stream.deliver_one(token(character, position))  # on the stream of a node, which goes on
        await asyncio.sleep(0)
    with pytest.raises(LookupError, match="a bug"):
        await asyncio.wait_for(reading, 1)


async def test_nothing_is_pushed_before_the_reader_has_written_the_beginning() -> None:
    stream = new_stream([])
    stream.deliver_one(token("a", 0))
    stream.deliver_one(token("b", 1))
    piece = await stream.next()
    assert piece.text == "ab"


def test_waiting_is_bounded_by_requests_and_by_tokens_and_a_long_prompt_may_wait_alone() -> None:
    admission = Admission(most_waiting=2, most_waiting_tokens=100)
    assert admission.refusal(500) is None
    admission.enter(500)
    assert "500 tokens" in (admission.refusal(1) or "")
    admission.leave(500)
    for _ in range(2):
        assert admission.refusal(50) is None
        admission.enter(50)
    assert "2 requests" in (admission.refusal(1) or "")
    admission.leave(50)
    assert admission.refusal(50) is None
    assert "50 tokens" in (admission.refusal(51) or "")
