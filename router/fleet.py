"""All nodes that this router knows, each behind its link; what placement chooses from; tickets for what it chose.

The registry says who exists, the links say how they are. A node leaves the fleet only when the registry no longer names it *and*
its link is down: so losing the registry, or finding it empty after a restart, stops nothing.

Must not know: texts, clients of the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from decant_proto.v1 import node_pb2

from foundation.background import Background, end
from foundation.health import Wrong
from foundation.ids import AttemptId, NodeId
from foundation.keys import MasterKeys
from foundation.log import get_logger
from foundation.registry_entry import NodeEntry, Role
from foundation.registry_redis import RegistryUnavailable
from foundation.ticket import Ticket, digest_of_tokens, sign_ticket
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane
from router.clients import Hello, LinkTiming, NodeLink
from router.health import LinkState, Status
from router.placement import Candidate, Disaggregate, NodeKey, NoPlacement, Placement, PrefixMemory, place
from router.registry import NodeSource

log = get_logger()

REFRESH_S = 1.0
WITHHELD = "node_withheld"
LEAVING = frozenset({WITHHELD, "node_draining"})
"""Refusals of nodes whose streams are to go on elsewhere."""


class FleetListener(Protocol):
    def fleet_changed(self) -> None:
        """A node may have become usable."""

    def attempts_lost(self, node: NodeId, requests: Sequence[str], reason: str) -> None: ...

    def attempts_leaving(self, node: NodeId, requests: Sequence[str]) -> None:
        """The node is draining, or is to be spared: these should go on elsewhere where there is room. Said again and again."""

    def outputs(self, node: NodeId, outputs: node_pb2.StepOutput) -> None: ...


class Fleet:
    """Implements `LinkListener`. `start` once, `close` once."""

    def __init__(
        self,
        source: NodeSource,
        router_id: str,
        keys: MasterKeys,
        timing: LinkTiming,
        now: Callable[[], float],
        tokenizer_fingerprint: str | None = None,
        disaggregate: Disaggregate = Disaggregate.ALWAYS,
        plane: GrpcPlane = IN_THE_CLEAR,
    ) -> None:
        """`tokenizer_fingerprint`: nodes with another one are given no work; None takes all."""
        self.registry_down_since_s: float | None = None
        self._source = source
        self._router_id = router_id
        self._keys = keys
        self._timing = timing
        self._now = now
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._disaggregate = disaggregate
        self._plane = plane
        self._links: dict[NodeId, NodeLink] = {}
        self._memory = PrefixMemory()
        self._withheld: set[NodeId] = set()
        """Nodes that an operator told this router to give no work."""
        self._pending: dict[str, tuple[NodeLink, int]] = {}
        """Requests without a first token: where their prompt is being computed, and its tokens."""
        self._listener: FleetListener | None = None
        self._background: Background | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: FleetListener, background: Background) -> None:
        self._listener, self._background = listener, background
        self._task = background.start(self._follow_registry(), "fleet")

    async def close(self) -> None:
        await end(self._task)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await self._source.close()

    # --- what placement and front ends ask

    def links(self, role: Role) -> list[NodeLink]:
        return [link for link in self._links.values() if link.entry.role is role]

    def link(self, node: NodeId) -> NodeLink | None:
        return self._links.get(node)

    def not_ready_reasons(self) -> list[str]:
        """Empty when a request could be served now."""
        decoders = self.links(Role.DECODE)
        if any(self.refusal(link) is None for link in decoders):
            return []
        if not decoders:
            return ["no_decode_node"]
        return [f"{link.node_id}: {self.refusal(link)}" for link in decoders]

    def problem(self) -> Wrong | None:
        """Why no request could be served now; None when one could."""
        reasons = self.not_ready_reasons()
        if not reasons or reasons == ["no_decode_node"]:
            return Wrong("no_decode_node") if reasons else None
        return Wrong("no_usable_decode_node", ", ".join(reasons))

    def usable_by_role(self) -> dict[str, int]:
        return {role.value: sum(self.refusal(link) is None for link in self.links(role)) for role in Role}

    def describe_registry(self) -> dict[str, object]:
        down_since_s = self.registry_down_since_s
        if down_since_s is None:
            return {"status": "answers"}
        return {"status": "lost", "since_s": round(self._now() - down_since_s, 3)}

    def connected_by_role(self) -> dict[str, int]:
        live = (LinkState.READY, LinkState.SUSPECT)
        return {role.value: sum(link.health.state in live for link in self.links(role)) for role in Role}

    def describe(self) -> list[dict[str, object]]:
        """Every node as this router sees it now, for people."""
        return [
            {
                "node": link.node_id,
                "role": link.entry.role.value,
                "address": link.entry.control_address,
                "link": link.health.state.value,
                "refusal": (refusal := self.refusal(link)),
                "since_s": round(link.health.refused_for_s(self._now(), refusal), 3),
                "not_ready_reasons": list(link.health.status.not_ready_reasons) if link.health.status else [],
                "attempts": len(link.attempts),
            }
            for link in self._links.values()
        ]

    def withhold(self, node: NodeId, *, resume: bool) -> bool:
        """No new work for this node, and what it has goes elsewhere where there is room; or work again.

        False when there is no such node.
        """
        link = self._links.get(node)
        if link is None:
            return False
        (self._withheld.discard if resume else self._withheld.add)(node)
        if resume and self._listener is not None:
            self._listener.fleet_changed()
        self.link_reported(link)
        return True

    def context_limit(self) -> int | None:
        """The longest context of any decode node that is or was connected."""
        limits = [link.hello.max_model_len for link in self.links(Role.DECODE) if link.hello is not None]
        return max(limits, default=None)

    def place(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        chain: Sequence[int],
        avoid: frozenset[NodeId],
        *,
        with_room: bool = False,
        local_reason: str = "",
    ) -> Placement | NoPlacement:
        """`with_room`: only on a decode node whose engine would decode it at once, not queue it."""
        candidates = [self._candidate(link) for link in self._links.values()]
        return place(
            prompt_tokens,
            answer_tokens,
            chain,
            candidates,
            self._memory,
            avoid,
            self._disaggregate,
            with_room=with_room,
            local_reason=local_reason,
        )

    # --- what the dispatcher does with a placement

    def begin(self, request: str, placement: Placement, chain: Sequence[int], tokens: int) -> None:
        """Account for an attempt: load until its first token, and what the nodes will hold."""
        self._links[placement.decode.node].attempts.add(request)
        computing = placement.prefill[0] if placement.prefill else placement.decode
        link = self._links[computing.node]
        link.pending_prompts += 1
        link.pending_tokens += tokens
        self._pending[request] = (link, tokens)
        for node in {placement.decode, computing}:
            self._memory.remember(chain, node)

    def first_token_seen(self, request: str) -> None:
        pending = self._pending.pop(request, None)
        if pending is not None:
            link, tokens = pending
            link.pending_prompts -= 1
            link.pending_tokens -= tokens

    def attempt_over(self, request: str, node: NodeId) -> None:
        self.first_token_seen(request)
        link = self._links.get(node)
        if link is not None:
            link.attempts.discard(request)

    def prefill_choices(
        self, placement: Placement, attempt: AttemptId, prompt: tuple[int, ...], settled: tuple[int, ...]
    ) -> list[node_pb2.PrefillChoice]:
        """A signed choice for each prefill node of the placement, in its order."""
        decode = self._links[placement.decode.node].hello
        assert decode is not None, "a placed node is connected"
        if not placement.prefill:
            return []
        tokens = digest_of_tokens(prompt, settled)
        choices = []
        for node, incarnation in placement.prefill:
            link = self._links[node]
            status = link.health.status
            assert status is not None, "a placed node has reported"
            ticket = Ticket(
                attempt,
                len(placement.prefill),
                decode.incarnation,
                incarnation,
                status.epoch,
                decode.fingerprint_digest,
                tokens,
            )
            choices.append(
                node_pb2.PrefillChoice(
                    node_id=node,
                    control_address=link.entry.control_address,
                    ticket=sign_ticket(ticket, self._keys.for_node(node)),
                )
            )
        return choices

    # --- LinkListener

    def link_changed(self, link: NodeLink) -> None:
        assert self._listener is not None
        self._listener.fleet_changed()

    def link_reported(self, link: NodeLink) -> None:
        assert self._listener is not None
        if link.attempts and self.refusal(link) in LEAVING:
            self._listener.attempts_leaving(link.node_id, tuple(link.attempts))

    def link_lost(self, link: NodeLink, reason: str) -> None:
        assert self._listener is not None
        if link.attempts:
            self._listener.attempts_lost(link.node_id, tuple(link.attempts), reason)

    def outputs(self, link: NodeLink, outputs: node_pb2.StepOutput) -> None:
        assert self._listener is not None
        self._listener.outputs(link.node_id, outputs)

    # --- inside

    def _candidate(self, link: NodeLink) -> Candidate:
        status, hello = link.health.status, link.hello
        own = len(link.attempts) if link.entry.role is Role.DECODE else link.pending_prompts
        return Candidate(
            key=NodeKey(link.node_id, hello.incarnation if hello else link.entry.incarnation),
            role=link.entry.role,
            refusal=self.refusal(link),
            compatible_with=hello.fingerprint_digest.hex() if hello else "",
            context_limit=_context_limit(hello, status) if hello else 0,
            sequences=max(own, status.running + status.waiting if status else 0),
            queued_tokens=max(link.pending_tokens, status.queued_tokens if status else 0),
            tokens_per_second=status.tokens_per_second if status else 0.0,
            kv_bytes_per_token=hello.kv_bytes_per_token if hello else 0,
            lanes=status.lanes if status else {},
            serves_alone=status is not None and status.serves_alone,
            broken_lanes=status.broken_lanes if status else frozenset(),
            seats=hello.max_num_seqs if hello else 0,
            step_tokens=hello.max_num_batched_tokens if hello else 0,
        )

    def refusal(self, link: NodeLink) -> str | None:
        """Why a node gets no new work now, by name; None when it does."""
        refusal = link.health.refusal(self._now())
        if refusal is None and link.node_id in self._withheld:
            return WITHHELD
        if refusal is None and link.hello is not None and self._tokenizer_fingerprint is not None:
            theirs = link.hello.fingerprint.tokenizer
            if theirs != self._tokenizer_fingerprint:
                return "node_has_another_tokenizer"
        return refusal

    async def _follow_registry(self) -> None:
        while True:
            try:
                entries = await self._source.entries()
            except RegistryUnavailable as error:
                if self.registry_down_since_s is None:
                    self.registry_down_since_s = self._now()
                    log.warning("registry lost; serving on with the nodes that are known", reason=str(error))
            else:
                if self.registry_down_since_s is not None:
                    log.info("registry found again", after_s=round(self._now() - self.registry_down_since_s, 3))
                    self.registry_down_since_s = None
                await self._adopt(entries)
            await self._source.changed(REFRESH_S)

    async def _adopt(self, entries: Sequence[NodeEntry]) -> None:
        named = {entry.node_id: entry for entry in entries}
        for node, entry in named.items():
            link = self._links.get(node)
            if link is not None and self._is_of(link, entry):
                continue
            if link is not None:
                if link.health.state is LinkState.READY and entry.role is link.entry.role and _same_place(link, entry):
                    continue
                await self._remove(link)
            self._add(entry)
        for node, link in list(self._links.items()):
            if node not in named and link.health.state in (LinkState.CONNECTING, LinkState.LOST):
                await self._remove(link)

    @staticmethod
    def _is_of(link: NodeLink, entry: NodeEntry) -> bool:
        if link.entry == entry:
            return True
        return _same_place(link, entry) and link.hello is not None and link.hello.incarnation == entry.incarnation

    def _add(self, entry: NodeEntry) -> None:
        link = NodeLink(entry, self._router_id, self._timing, self, self._now, self._plane)
        self._links[entry.node_id] = link
        assert self._background is not None
        link.start(self._background)

    async def _remove(self, link: NodeLink) -> None:
        del self._links[link.node_id]
        self._withheld.discard(link.node_id)
        self.link_lost(link, "node_gone")
        await link.close()


def _context_limit(hello: Hello, status: Status | None) -> int:
    """The longest context that fits, for a node's KV cache may be smaller than what its model allows."""
    if status is None or not status.blocks_total:
        return hello.max_model_len
    return min(hello.max_model_len, status.blocks_total * hello.block_size)


def _same_place(link: NodeLink, entry: NodeEntry) -> bool:
    return link.entry.control_address == entry.control_address and link.entry.role is entry.role
