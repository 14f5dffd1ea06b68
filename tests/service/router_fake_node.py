"""A fake node for tests of the router: speaks Node/Attach over a real gRPC server and computes nothing.

Its answer to a prompt is known beforehand: `expected_answer`. A token depends on the one before it, the position, the seed and
the choice, so a stream that goes on elsewhere with a lost or repeated token differs from then on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from decant_proto.v1 import node_pb2, node_pb2_grpc, types_pb2

from bench.ports import free_port
from foundation.ids import Incarnation, NodeId
from foundation.registry_entry import NodeEntry, Role

FINGERPRINT = types_pb2.Fingerprint(weights="w", architecture="fake", vocabulary_size=257, protocol_major=1)
BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 1000
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


def next_token(before: int, position: int, seed: int, choice: int) -> int:
    return LETTERS[zlib.crc32(f"{before} {position} {seed} {choice}".encode()) % len(LETTERS)]


def expected_answer(prompt: Sequence[int], count: int, seed: int, choice: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens), seed, choice))
    return tokens[len(prompt) :]


def expected_score(prompt: Sequence[int], position: int, best: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Log probability and rank of the prompt's token there, and the `best` likeliest; all are exact in 32 bits."""
    first = zlib.crc32(f"{prompt[position - 1]} {position}".encode()) % 200
    rank = 1 + prompt[position] % 7
    return -0.5 * rank, rank, [(first + other, -0.5 * (1 + other)) for other in range(best)]


@dataclass
class FakeRequest:
    submit: node_pb2.Submit
    router: Any
    history: list[int]
    script: list[int] | None = None
    emitted: int = 0
    scored: int = 1
    """Positions of the prompt that need no log probability any more."""

    @property
    def unscored(self) -> bool:
        submit = self.submit
        return submit.sampling.HasField("prompt_logprobs") and self.scored < len(submit.prompt_token_ids)

    def score(self, most: int) -> types_pb2.PromptLogprobs:
        prompt, best = self.submit.prompt_token_ids, self.submit.sampling.prompt_logprobs
        run = types_pb2.PromptLogprobs(position=self.scored)
        for position in range(self.scored, min(self.scored + most, len(prompt))):
            logprob, rank, likeliest = expected_score(prompt, position, best)
            run.logprobs.append(logprob)
            run.ranks.append(rank)
            run.top_token_ids.extend(token for token, _ in likeliest)
            run.top_logprobs.extend(value for _, value in likeliest)
        self.scored += len(run.logprobs)
        return run

    def step(self) -> types_pb2.Token:
        sampling, position = self.submit.sampling, len(self.history)
        if self.script is not None:
            token_id = self.script[position - len(self.submit.prompt_token_ids)]
        else:
            token_id = next_token(self.history[-1], position, sampling.seed, self.submit.choice_index)
        token = types_pb2.Token(position=position, token_id=token_id)
        if sampling.HasField("logprobs"):
            token.logprob = -0.5
            for rank in range(sampling.logprobs):
                token.top_logprobs.add(token_id=(token_id + rank) % 256, logprob=-0.5 - rank)
        self.history.append(token_id)
        self.emitted += 1
        return token


@dataclass
class FakeNode(node_pb2_grpc.NodeServicer):
    """Set the plain fields at any time; they act from the next step on."""

    node_id: str
    role: Role = Role.DECODE
    incarnation: int = 1
    script: list[int] | None = None
    """Tokens to answer with, whatever was asked."""
    step_s: float = 0.001
    tokens_until_pause: int | None = None
    """After so many tokens of a request nothing more is computed for it; the node goes on speaking."""
    score_run: int = 5
    """Positions of a prompt that it scores in one step; 0: it knows nothing of scores."""
    score_pause: int | None = None
    """Beyond so many positions no prompt is scored; the node goes on speaking."""
    refusal: str | None = None
    """Refuse every request with this reason."""
    refusal_retryable: bool = True
    retry_after_s: float = 0.0
    silent: bool = False
    """Says nothing any more, heartbeats included."""
    ready: bool = True
    draining: bool = False
    has_work: bool = False
    max_model_len: int = 512
    max_num_seqs: int = 0
    tokenizer: str = ""
    hello_node_id: str | None = None
    submits: list[node_pb2.Submit] = field(default_factory=list)
    cancels: list[node_pb2.Cancel] = field(default_factory=list)
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    attached: int = 0
    port: int = 0
    """0: drawn at the first start. It stays the node's own while the node is down, and others dial it."""
    epoch: int = 7
    prompt_tokens_per_second: float = 0.0
    queued_tokens: int = 0
    lanes: dict[str, float] = field(default_factory=dict)
    serves_alone: bool = False
    broken_lanes: list[str] = field(default_factory=list)
    detail: node_pb2.NodeDetail | None = None
    """What it tells routers that have asked to watch it."""
    watches: int = 0

    @property
    def entry(self) -> NodeEntry:
        return NodeEntry(NodeId(self.node_id), self.role, f"127.0.0.1:{self.port}", Incarnation(self.incarnation))

    async def start(self) -> None:
        self._routers: set[asyncio.Queue[node_pb2.NodeMessage | None]] = set()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        node_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        self.port = self.port or free_port()
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self._task = asyncio.create_task(self._compute())

    async def kill(self) -> None:
        """Every stream breaks at once and the port is closed."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._server.stop(None)
        self.requests.clear()

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[node_pb2.NodeMessage]:
        outgoing: asyncio.Queue[node_pb2.NodeMessage | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, outgoing))
        hello = node_pb2.NodeHello(
            fingerprint=FINGERPRINT,
            model_id="fake",
            max_model_len=self.max_model_len,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            max_num_seqs=self.max_num_seqs,
        )
        hello.fingerprint.tokenizer = self.tokenizer
        hello.entry.node_id = self.hello_node_id or self.node_id
        hello.entry.role = types_pb2.ROLE_DECODE if self.role is Role.DECODE else types_pb2.ROLE_PREFILL
        hello.entry.incarnation = self.incarnation
        self._routers.add(outgoing)
        self.attached += 1
        try:
            yield node_pb2.NodeMessage(hello=hello)
            yield self._status()
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            self._routers.discard(outgoing)
            reader.cancel()
            self.requests = {name: one for name, one in self.requests.items() if one.router is not outgoing}

    async def _read(self, messages: AsyncIterator[node_pb2.RouterMessage], outgoing: asyncio.Queue[Any]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._take(message.submit, outgoing)
                case "watch":
                    self.watches += 1
                case "cancel":
                    self.cancels.append(message.cancel)
                    known = self.requests.get(message.cancel.request_id)
                    if known is not None and known.submit.attempt == message.cancel.attempt:
                        del self.requests[message.cancel.request_id]
        outgoing.put_nowait(None)

    def _take(self, submit: node_pb2.Submit, outgoing: asyncio.Queue[Any]) -> None:
        self.submits.append(submit)
        if self.refusal is not None:
            output = node_pb2.RequestOutput(
                request_id=submit.request_id,
                attempt=submit.attempt,
                finish_reason=types_pb2.FINISH_REASON_FAILED,
                failure=self.refusal,
                retryable=self.refusal_retryable,
                retry_after_ms=round(self.retry_after_s * 1000),
            )
            outgoing.put_nowait(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=[output])))
            return
        history = [*submit.prompt_token_ids, *submit.settled_token_ids]
        self.requests[submit.request_id] = FakeRequest(submit, outgoing, history, self.script)

    def _status(self) -> node_pb2.NodeMessage:
        status = node_pb2.NodeStatus(
            ready=self.ready,
            draining=self.draining,
            running=len(self.requests),
            has_work=self.has_work,
            epoch=self.epoch,
            queued_tokens=self.queued_tokens,
            prompt_tokens_per_second=self.prompt_tokens_per_second,
            serves_alone=self.serves_alone,
            broken_lanes=self.broken_lanes,
            lanes=[node_pb2.LaneSpeed(node_id=node, bytes_per_second=speed) for node, speed in self.lanes.items()],
        )
        return node_pb2.NodeMessage(status=status)

    async def _compute(self) -> None:
        loop = asyncio.get_running_loop()
        next_status_s = loop.time()
        while True:
            await asyncio.sleep(self.step_s)
            if self.silent:
                continue
            for router in self._routers:
                outputs = [
                    self._output(one)
                    for one in list(self.requests.values())
                    if one.router is router and self._moves(one)
                ]
                if outputs:
                    router.put_nowait(node_pb2.NodeMessage(step=node_pb2.StepOutput(outputs=outputs)))
            if loop.time() >= next_status_s:
                next_status_s = loop.time() + 0.02
                self.tell_status()

    def tell_status(self) -> None:
        for router in self._routers:
            router.put_nowait(self._status())
            if self.watches and self.detail is not None:
                router.put_nowait(node_pb2.NodeMessage(detail=self.detail))

    def say(self, message: node_pb2.NodeMessage) -> None:
        for router in self._routers:
            router.put_nowait(message)

    def _moves(self, request: FakeRequest) -> bool:
        if request.unscored and self.score_run:
            return self.score_pause is None or request.scored < self.score_pause
        return self.tokens_until_pause is None or request.emitted < self.tokens_until_pause

    def _output(self, request: FakeRequest) -> node_pb2.RequestOutput:
        submit = request.submit
        if request.unscored and self.score_run:
            scores = request.score(self.score_run)
            return node_pb2.RequestOutput(request_id=submit.request_id, attempt=submit.attempt, prompt_logprobs=scores)
        output = node_pb2.RequestOutput(request_id=submit.request_id, attempt=submit.attempt, tokens=[request.step()])
        if request.emitted == 1:
            output.prompt_account.cached = min(BLOCK_SIZE, len(submit.prompt_token_ids))
        answered = len(request.history) - len(submit.prompt_token_ids)
        last = output.tokens[0].token_id
        if last in submit.sampling.stop_token_ids or (last == 256 and not submit.sampling.ignore_eos):
            output.finish_reason = types_pb2.FINISH_REASON_STOP
        elif answered >= submit.sampling.max_tokens:
            output.finish_reason = types_pb2.FINISH_REASON_LENGTH
        if output.finish_reason:
            del self.requests[submit.request_id]
        return output


@asynccontextmanager
async def running(*nodes: FakeNode) -> AsyncIterator[None]:
    for node in nodes:
        await node.start()
    try:
        yield
    finally:
        for node in nodes:
            await node.kill()
