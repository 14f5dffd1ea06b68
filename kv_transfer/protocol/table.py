"""An immutable mapping: what the states of the protocol keep their parts in.

Hashable, so that a search can recognise a state; a change makes a copy, which is cheap at the sizes that occur here
(the peers, sessions and transfers of one node, the slots of a session).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Table(Mapping[Key, Value]):
    __slots__ = ("_entries", "_hash")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        self._entries: dict[Key, Value] = dict(entries or {})
        self._hash: int | None = None

    # `get`, `values` and `items` are Mapping's, without its detours.

    if not TYPE_CHECKING:

        def get(self, key, default=None):
            return self._entries.get(key, default)

    def values(self) -> ValuesView[Value]:
        return self._entries.values()

    def items(self) -> ItemsView[Key, Value]:
        return self._entries.items()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._entries.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._entries == other._entries

    def __repr__(self) -> str:
        return repr(self._entries)

    def put(self, key: Key, value: Value) -> Table[Key, Value]:
        """A copy in which `key` has this value."""
        copy: Table[Key, Value] = Table(self._entries)
        copy._entries[key] = value
        return copy

    def drop(self, key: Key) -> Table[Key, Value]:
        """A copy without `key`, which must be there."""
        copy: Table[Key, Value] = Table(self._entries)
        del copy._entries[key]
        return copy
