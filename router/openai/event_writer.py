"""Server-sent events of an answer's middle, written straight to the client's connection as tokens come.

One event costs no turn of the event loop and no coroutine: this is what a router does thousands of times a second. The beginning
and the end of an answer, and whatever comes while the client does not read, go through the response as usual.

Must not know: nodes, how answers are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import HttpVersion11, web

from router.answer import AnswerStream, Piece
from router.openai.answers import Answer


class EventWriter:
    """Implements `router.answer.Push` for one choice of an answer whose response has begun."""

    __slots__ = ("_answer", "_index", "_protocol", "_transport", "_usage")

    def __init__(self, request: web.Request, answer: Answer, index: int, *, usage: bool) -> None:
        """`usage`: every chunk tells it."""
        assert request.transport is not None
        self._transport = request.transport
        self._protocol = request.protocol
        self._answer = answer
        self._index = index
        self._usage = usage

    def ready(self) -> bool:
        return not self._protocol.writing_paused

    def take(self, piece: Piece) -> None:
        chunk = self._answer.chunk(self._index, piece, self._answer.usage() if self._usage else None)
        if chunk and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def push_rest(request: web.Request, answer: Answer, streams: Sequence[AnswerStream], *, usage: bool) -> None:
    """From now on, what comes is written as it comes. The response must have written something, so that its head is gone."""
    if request.version < HttpVersion11 or request.transport is None:
        return  # no chunks there: the response knows how to write without
    for index, stream in enumerate(streams):
        stream.push = EventWriter(request, answer, index, usage=usage)
