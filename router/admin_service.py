"""decant.v1.Admin over gRPC: what operators ask a router, and the one thing they tell it, which node to spare.

Must not know: texts, HTTP.
"""

from __future__ import annotations

import grpc.aio
from decant_proto.v1 import admin_pb2, admin_pb2_grpc

from foundation.ids import NodeId
from foundation.log import get_logger
from foundation.registry_entry import Role
from router.clients import NodeLink
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.health import Status
from router.wording import Account

log = get_logger()


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    async def Nodes(
        self,
        request: admin_pb2.NodesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.NodesRequest, admin_pb2.NodesReply],
    ) -> admin_pb2.NodesReply:
        links = [link for role in Role for link in self._fleet.links(role)]
        return admin_pb2.NodesReply(nodes=[self._node(link) for link in links])

    async def Requests(
        self,
        request: admin_pb2.RequestsRequest,
        context: grpc.aio.ServicerContext[admin_pb2.RequestsRequest, admin_pb2.RequestsReply],
    ) -> admin_pb2.RequestsReply:
        accounts = self._dispatcher.accounts(waiting=request.waiting)
        if request.request_id:
            accounts = [account for account in accounts if account.named(request.request_id)]
        return admin_pb2.RequestsReply(requests=[_request(account) for account in accounts])

    async def Drain(
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainReply],
    ) -> admin_pb2.DrainReply:
        node = NodeId(request.node_id)
        if not self._fleet.withhold(node, resume=request.resume):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"node_id: this router knows no node {request.node_id!r}")
        log.info("node gets work again" if request.resume else "node gets no more work", node=node)
        link = self._fleet.link(node)
        return admin_pb2.DrainReply(attempts=len(link.attempts) if link is not None else 0)

    def _node(self, link: NodeLink) -> admin_pb2.NodeView:
        status = link.health.status or Status()
        return admin_pb2.NodeView(
            node_id=link.node_id,
            role=link.entry.role.value,
            control_address=link.entry.control_address,
            link=link.health.state.value,
            refusal=self._fleet.refusal(link) or "",
            not_ready_reasons=status.not_ready_reasons,
            attempts=len(link.attempts),
            running=status.running,
            waiting=status.waiting,
            queued_tokens=status.queued_tokens,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free,
            prompt_tokens_per_second=status.tokens_per_second,
        )


def _request(account: Account) -> admin_pb2.RequestView:
    return admin_pb2.RequestView(
        request_id=account.request,
        correlation_id=account.correlation,
        attempt=account.attempt,
        waits_on=account.waits_on or "",
        waits_for=account.waits_for,
        since_s=account.since_s,
        computed_on=account.computed_on or "",
        placed_because=account.placed_because or "",
        expected_s=account.expected_s,
        prompt_tokens=account.prompt_tokens,
        answer_tokens=account.answer_tokens,
        lost=account.lost,
    )
