"""A test client that acts as a router: speaks the Node stream, signs tickets, keeps the emitted tokens by position."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from decant_proto.v1 import node_pb2, node_pb2_grpc, types_pb2
from waiting import happens

from foundation.fingerprint import Fingerprint
from foundation.ids import AttemptId, Incarnation, NodeId, RequestId
from foundation.keys import MasterKeys
from foundation.ticket import Ticket, digest_of_fingerprint, digest_of_tokens, sign_ticket

LEASE_MS = 5000
HEARTBEAT_S = 0.5

_request_numbers = itertools.count(1)


def greedy(max_tokens: int, **more: Any) -> types_pb2.SamplingParameters:
    return types_pb2.SamplingParameters(
        temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True, **more
    )


@dataclass
class Answer:
    """What the router has heard of one attempt."""

    prompt_length: int
    settled_length: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: int = types_pb2.FINISH_REASON_UNSPECIFIED
    failure: str = ""
    retryable: bool = False
    retry_after_ms: int = 0
    account: node_pb2.PromptAccount | None = None
    arrivals_s: list[float] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: node_pb2.RequestOutput) -> None:
        assert not self.ended.is_set(), f"{output} after the end"
        for token in output.tokens:
            expected = self.prompt_length + self.settled_length + len(self.tokens)
            assert token.position == expected, f"token for {token.position}, {expected} is next"
            self.tokens.append(token.token_id)
            self.logprobs.append(token.logprob if token.HasField("logprob") else None)
            self.arrivals_s.append(asyncio.get_running_loop().time())
        if output.HasField("prompt_account"):
            assert self.account is None, "a second prompt account"
            self.account = output.prompt_account
        if output.finish_reason:
            self.finish_reason, self.failure = output.finish_reason, output.failure
            self.retryable, self.retry_after_ms = output.retryable, output.retry_after_ms
            self.ended.set()
        self.changed.set()

    async def end(self, within_s: float = 60.0) -> Answer:
        assert await happens(self.ended, within_s), f"no end within {within_s} s after {len(self.tokens)} tokens"
        return self

    async def has_tokens(self, count: int, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.tokens) < count and not self.ended.is_set():
                self.changed.clear()
                await self.changed.wait()
        assert len(self.tokens) >= count, f"ended with {len(self.tokens)} tokens: {self.failure}"


class RouterClient:
    """One router's stream to one node."""

    def __init__(self, stream: Any, hello: node_pb2.NodeHello, status: node_pb2.NodeStatus) -> None:
        self._stream = stream
        self.hello = hello
        self.status = status
        self.status_changed = asyncio.Event()
        self.stream_ended = asyncio.Event()
        self.failure: BaseException | None = None
        self._answers: dict[tuple[str, int], Answer] = {}
        self._outbox: asyncio.Queue[node_pb2.RouterMessage] = asyncio.Queue()

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.hello.entry.incarnation)

    @property
    def fingerprint(self) -> Fingerprint:
        wire = self.hello.fingerprint
        return Fingerprint(**{name.name: getattr(wire, name.name) for name in wire.DESCRIPTOR.fields})

    def submit(
        self,
        prompt: Sequence[int],
        sampling: types_pb2.SamplingParameters,
        *,
        settled: Sequence[int] = (),
        choices: Sequence[node_pb2.PrefillChoice] = (),
        request_id: str | None = None,
        attempt: int = 1,
        deadline_ms: int = 60_000,
        choice_index: int = 0,
    ) -> Answer:
        request_id = request_id or new_request_id()
        answer = self._answers[request_id, attempt] = Answer(len(prompt), len(settled))
        message = node_pb2.Submit(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=prompt,
            settled_token_ids=settled,
            sampling=sampling,
            choice_index=choice_index,
            deadline_ms=deadline_ms,
            prefill_choices=choices,
        )
        self._outbox.put_nowait(node_pb2.RouterMessage(submit=message))
        return answer

    def cancel(self, request_id: str, attempt: int = 1) -> None:
        message = node_pb2.Cancel(request_id=request_id, attempt=attempt, reason="client_gone")
        self._outbox.put_nowait(node_pb2.RouterMessage(cancel=message))

    async def beat(self) -> None:
        while True:
            self._outbox.put_nowait(node_pb2.RouterMessage(heartbeat=node_pb2.RouterHeartbeat()))
            await asyncio.sleep(HEARTBEAT_S)

    async def write(self) -> None:
        while True:
            await self._stream.write(await self._outbox.get())

    async def listen(self) -> None:
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                match message.WhichOneof("message"):
                    case "status":
                        self.status = message.status
                        self.status_changed.set()
                    case "step":
                        for output in message.step.outputs:
                            self._answers[output.request_id, output.attempt].take(output)
        except grpc.aio.AioRpcError as error:
            self.failure = error
        finally:
            self.stream_ended.set()


def new_request_id() -> str:
    return f"request-{next(_request_numbers)}"


def attached(control_address: str, router_id: str = "test-router") -> AbstractAsyncContextManager[RouterClient]:
    return attached_over(grpc.aio.insecure_channel(control_address), router_id)


@asynccontextmanager
async def attached_over(opened: grpc.aio.Channel, router_id: str = "test-router") -> AsyncIterator[RouterClient]:
    async with opened as channel:
        stream: Any = node_pb2_grpc.NodeStub(channel).Attach()
        hello = node_pb2.RouterHello(router_id=router_id, lease_ms=LEASE_MS)
        await stream.write(node_pb2.RouterMessage(hello=hello))
        client = RouterClient(stream, (await stream.read()).hello, (await stream.read()).status)
        tasks = [asyncio.create_task(work) for work in (client.beat(), client.write(), client.listen())]
        try:
            yield client
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def prefill_choice(
    keys: MasterKeys,
    decode: RouterClient,
    prefill: RouterClient,
    request_id: str,
    prompt: Sequence[int],
    settled: Sequence[int] = (),
    attempt: int = 1,
    max_tries: int = 4,
) -> node_pb2.PrefillChoice:
    """A signed permission, as a router gives it."""
    ticket = Ticket(
        attempt=AttemptId(RequestId(request_id), attempt),
        max_tries=max_tries,
        decode_incarnation=decode.incarnation,
        prefill_incarnation=prefill.incarnation,
        epoch=prefill.status.epoch,
        fingerprint=digest_of_fingerprint(prefill.fingerprint),
        tokens=digest_of_tokens(tuple(prompt), tuple(settled)),
    )
    entry = prefill.hello.entry
    return node_pb2.PrefillChoice(
        node_id=entry.node_id,
        control_address=entry.control_address,
        ticket=sign_ticket(ticket, keys.for_node(NodeId(entry.node_id))),
    )
