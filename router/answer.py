"""One answer on its way to its client: what the dispatcher delivers, as text, to whoever reads.

The reader gets everything that has come since it last asked in one `Piece`, so a slow client costs no queue of messages; what is
held is bounded by the answer's max_tokens. A reader may also have the pieces of the middle of an answer pushed: they are written
as they come, without a turn of the event loop in between, and `next` is left with the beginning, the end, and what was not taken.

Must not know: nodes, HTTP, gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from decant_proto.v1 import types_pb2

from router.generation import Generation, Refusal
from router.journey import Ending, PositionedToken
from router.prompt_scores import PromptScores
from router.text import AnswerText, AnyDetokenizer

WRITE_GRACE_S = 30.0
"""After a request's deadline its client may take so long to read what has been written."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens. `finish_reason` or `failure` stands in the last piece, one of the two."""

    text: str
    tokens: Sequence[types_pb2.Token]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer; None for the model's own end."""
    failure: Refusal | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.failure is not None


class Push(Protocol):
    """Where pieces are written as they come. Neither method waits."""

    def ready(self) -> bool:
        """Whether the client reads what is written; while it does not, pieces wait for `next`."""

    def take(self, piece: Piece) -> None: ...


class AnswerStream:
    """Read with `next` until a piece is `last`; `close` in any case."""

    def __init__(
        self,
        generation: Generation,
        detokenizer: AnyDetokenizer,
        stop_found: Callable[[], None],
        client_left: Callable[[], None],
    ) -> None:
        sampling = generation.sampling
        self.generation = generation
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        """Prompt tokens whose KV was cached on the decode node; None before the first token."""
        self.finish_reason: str | None = None
        self.prompt_scores = PromptScores(len(generation.prompt)) if sampling.prompt_logprobs is not None else None
        """Complete before the first token."""
        self._text = AnswerText(
            detokenizer,
            sampling.stop,
            sampling.min_tokens,
            include_stop=sampling.include_stop,
        )
        self._stop_found = stop_found
        self._client_left = client_left
        self._tokens: list[types_pb2.Token] = []
        self._ending: Ending | None = None
        self._failure: Refusal | None = None
        self._wake: asyncio.Future[None] | None = None
        self.push: Push | None = None
        """Set by the reader when it has written its first piece."""
        self._last: Piece | None = None
        """The last piece, which is found before it is asked for."""
        self._broken: Exception | None = None
        """A bug in what this answer needs, for its reader."""
        self._closed = False

    # --- the dispatcher's side

    def deliver(self, tokens: Sequence[PositionedToken]) -> None:
        self._tokens.extend(cast("Sequence[types_pb2.Token]", tokens))
        self._awaken()

    def deliver_one(self, tokens: Sequence[PositionedToken]) -> None:
        """The next token of an answer that goes on. Pushed only while the reader waits in `next`: it has written all it had."""
        push, waiting = self.push, self._wake
        if push is None or waiting is None or waiting.done() or not push.ready():
            self.deliver(tokens)
            return
        try:
            piece = self._piece(cast("Sequence[types_pb2.Token]", tokens))
            if piece.last:
                self._last = piece
                self._awaken()
            else:
                push.take(piece)
        except Exception as error:
            self._break(error)

    def finish(self, ending: Ending) -> None:
        """Reads what has come to its end, for a stop string in it is what ends the answer; `finish_reason` is known then."""
        if not self._ended:
            self._ending, self.finish_reason = ending, "length" if ending is Ending.LENGTH else "stop"
            self._read_rest()

    def fail(self, failure: Refusal) -> None:
        """The same: `finish_reason` is set where a stop string in what has come had ended the answer before it failed."""
        if not self._ended:
            self._failure = failure
            self._read_rest()

    # --- the reader's side

    async def next(self) -> Piece:
        """Waits for something new. At most one reader; not again after the last piece."""
        if not self._tokens and self._last is None and self._broken is None:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        if self._broken is not None:
            raise self._broken
        if self._last is not None:
            return self._last
        tokens, self._tokens = self._tokens, []
        return self._piece(tokens)

    def close(self) -> None:
        """The reader needs no more: everything held for an unfinished request is given back."""
        if not self._closed:
            self._closed = True
            self._client_left()

    @property
    def _ended(self) -> bool:
        return self.finish_reason is not None or self._failure is not None or self._broken is not None

    def _read_rest(self) -> None:
        tokens, self._tokens = self._tokens, []
        try:
            self._last = self._piece(tokens)
        except Exception as error:
            self.finish_reason = None
            self._break(error)
        self._awaken()

    def _break(self, error: Exception) -> None:
        """A bug ends this answer's reader, not the node's stream, on which everybody's tokens come."""
        self._broken = error
        self._awaken()

    def _piece(self, tokens: Sequence[types_pb2.Token]) -> Piece:
        texts = []
        # The token that ends an answer is counted, but written only if it was asked for.
        unwritten = len(tokens) - 1 if self._ending is Ending.STOP and not self.generation.sampling.include_stop else -1
        for index, token in enumerate(tokens):
            self.completion_tokens += 1
            if index == unwritten:
                break
            texts.append(self._text.add(token.token_id))
            if self._text.stop_found is not None:
                return self._stopped("".join(texts), tokens[: index + 1])
        if self._ending is None and self._failure is None:
            return Piece("".join(texts), tokens)
        texts.append(self._text.finish())
        if self._failure is not None:
            return Piece("".join(texts), tokens, failure=self._failure)
        if self._text.stop_found is not None:  # in what was held back
            return self._stopped("".join(texts), tokens)
        return Piece("".join(texts), tokens, self.finish_reason, self._stop_token(tokens))

    def _stopped(self, text: str, tokens: Sequence[types_pb2.Token]) -> Piece:
        goes_on = not self._ended
        self.finish_reason, self._failure = "stop", None
        if goes_on:
            self._stop_found()
        return Piece(text, tokens, "stop", self._text.stop_found)

    def _stop_token(self, tokens: Sequence[types_pb2.Token]) -> int | None:
        if self._ending is Ending.STOP and tokens and tokens[-1].token_id in self.generation.sampling.stop_token_ids:
            return tokens[-1].token_id
        return None

    def _awaken(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


async def pieces_of(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices, each with its number, as they come, until every choice has ended or one has failed."""
    if len(streams) == 1:
        while True:
            piece = await streams[0].next()
            yield 0, piece
            if piece.last:
                return
    reading = {asyncio.create_task(stream.next()): index for index, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = reading.pop(task)
                piece = task.result()
                if not piece.last:
                    reading[asyncio.create_task(streams[index].next())] = index
                yield index, piece
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
