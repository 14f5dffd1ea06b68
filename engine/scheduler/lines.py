"""A waiting line, ordered by arrival whoever joins when: a preempted request gets its old place back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class Line:
    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    @property
    def last(self) -> Request | None:
        return self._requests[-1] if self._requests else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_arrival)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._requests, request.arrival, key=_arrival)
        assert self._requests[place] is request, f"{request.key} is not in this line"
        del self._requests[place]
