"""The digests of a transfer's parcels, by index: what P has sent, what D has verified.

Immutable and hashable as a `Table` is, of which it is made: one for each page of parcels, so that a digest more copies one page
and the list of pages, however many parcels (`plan.PARCELS_AT_MOST`) a transfer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kv_transfer.protocol.table import Table

PARCELS_A_PAGE = 64
_EMPTY: Table[int, int] = Table()


class Digests(Mapping[int, int]):
    __slots__ = ("_count", "_pages")

    def __init__(self, pages: Table[int, Table[int, int]] | None = None, count: int = 0) -> None:
        self._pages: Table[int, Table[int, int]] = pages or Table()
        self._count = count

    def put(self, index: int, digest: int) -> Digests:
        page = self._pages.get(index // PARCELS_A_PAGE, _EMPTY)
        pages = self._pages.put(index // PARCELS_A_PAGE, page.put(index, digest))
        return Digests(pages, self._count + (index not in page))

    def drop(self, index: int) -> Digests:
        """A copy without `index`, which must be there."""
        page = self._pages[index // PARCELS_A_PAGE].drop(index)
        if page:
            return Digests(self._pages.put(index // PARCELS_A_PAGE, page), self._count - 1)
        return Digests(self._pages.drop(index // PARCELS_A_PAGE), self._count - 1)

    def __getitem__(self, index: int) -> int:
        return self._pages[index // PARCELS_A_PAGE][index]

    def __iter__(self) -> Iterator[int]:
        return (index for page in self._pages.values() for index in page)

    def __len__(self) -> int:
        return self._count

    def __hash__(self) -> int:
        return hash(self._pages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self._pages == other._pages

    def __repr__(self) -> str:
        return repr(dict(self))
