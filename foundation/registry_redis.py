"""The registry in Redis: nodes announce and withdraw, routers list.

Every call ends within `timeout_s` and raises `RegistryUnavailable` when Redis does not answer; callers keep what they know and
come again. The client reconnects by itself.

Must not know: gRPC, what a node does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import KEY_PREFIX, NodeEntry, decode, encode, node_key

MOST_NODES = 4096
"""Entries read in one listing; more than this in one registry is taken for garbage and left out."""

# Deletes the entry only while it is this incarnation's: a node that has been restarted elsewhere stays listed.
_WITHDRAW = """
local found = redis.call('GET', KEYS[1])
if found then
  local ok, entry = pcall(string.match, found, '"incarnation":%s*(%d+)')
  if ok and entry == ARGV[1] then return redis.call('DEL', KEYS[1]) end
end
return 0
"""


class RegistryUnavailable(Exception):
    """Redis did not answer, or answered with an error."""


class RedisRegistry:
    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        """`url` as in redis-py: redis://[[user]:password@]host[:port][/db], rediss:// or unix://. ValueError if it is none."""
        self._client: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # callers come again by themselves; one call ends in time
        )
        self._timeout_s = timeout_s

    async def announce(self, entry: NodeEntry, lease_s: float) -> None:
        await self._answer(self._client.set(node_key(entry.node_id), encode(entry), px=max(1, round(lease_s * 1000))))

    async def withdraw(self, node_id: NodeId, incarnation: Incarnation) -> None:
        """Removes the entry if it is this incarnation's; another's is left alone."""
        await self._answer(self._client.eval(_WITHDRAW, 1, node_key(node_id), str(incarnation)))

    async def entries(self) -> list[NodeEntry]:
        """Every live entry, in order of node id. Values that are no entry are skipped."""
        keys = await self._answer(self._keys())
        if not keys:
            return []
        values = await self._answer(self._client.mget(keys))
        entries = (decode(value) for value in values if value is not None)
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.node_id)

    async def close(self) -> None:
        await self._client.aclose()

    async def _keys(self) -> list[bytes]:
        keys: list[bytes] = []
        async for key in self._client.scan_iter(match=KEY_PREFIX + "*", count=1000):
            keys.append(key)
            if len(keys) == MOST_NODES:
                break
        return keys

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise RegistryUnavailable(f"{type(error).__name__}: {error}") from error
