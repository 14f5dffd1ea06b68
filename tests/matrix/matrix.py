"""`make matrix`: every field of the API through a prefill and a decode node, beside the same decode node alone.

Each row of `matrix_rows` is asked three times: of a router that has every prompt computed on a prefill node, whole and as a
stream, and of one whose decode node computes it itself. The three answers must be equal (tokens, text, calls, log probabilities
up to rounding, usage), or the same 4xx that names the field; and the row's own claim about the answer must hold. Then answers
under a JSON schema lose their decode node in mid-object. Prints one table and one closing line; exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from deployment import Deployment, NodeKind, RouterProcess, Spent
from matrix_rows import COMPLETIONS, PROMPT, ROWS, Answer, Row, body_of, uncovered

from decant.default_model import ensure_default_model

TEMPLATE = Path(__file__).with_name("chatml_hermes_tools.jinja")
LOGPROB_TOLERANCE = 2e-3
AT_ONCE = 6
ANSWER_LIMIT_S = 300.0
KILL_AFTER_CHUNKS = 12
"""Then the object is open, and its decode node is killed."""
FAILOVERS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 5})
DECODERS = 2
DECODER = NodeKind("decode", 32)
TOUR = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "bridges": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4, "maxItems": 6},
    },
    "required": ["city", "bridges"],
    "additionalProperties": False,
}


class MatrixDeployment(Deployment):
    """Its routers write tools into prompts."""

    router_options = (f"--chat-template={TEMPLATE}",)


class Client:
    """One router's."""

    def __init__(self, router: RouterProcess, http: aiohttp.ClientSession) -> None:
        self.router = router
        self._http = http
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        async with self._turns, self._http.post(self.router.url + path, json=body) as response:
            if response.status != 200:
                return Answer(response.status, error=(await response.json())["error"])
            if body.get("stream"):
                return join_stream([chunk async for chunk in events(response)])
            return whole(await response.json())


async def events(response: aiohttp.ClientResponse) -> Any:
    """The stream's objects; fails where it ends without [DONE] or with an error."""
    async for line in response.content:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            chunk = json.loads(line[len(b"data: ") :])
            assert "error" not in chunk, chunk
            yield chunk
    raise AssertionError("the stream ended without [DONE]")


def whole(found: Mapping[str, Any]) -> Answer:
    choices = []
    for choice in found["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        scored = choice.get("prompt_logprobs", found.get("prompt_logprobs"))
        calls = [{**call, "id": bool(call["id"])} for call in message.get("tool_calls") or []]
        choices.append(
            {
                "text": message["content"] or "",
                "tool_calls": calls,
                **{name: choice[name] for name in ("finish_reason", "stop_reason", "logprobs")},
                "token_ids": choice.get("token_ids"),
                **({} if scored is None else {"prompt_logprobs": scored}),
            }
        )
    return Answer(200, choices, counts(found["usage"]))


def join_stream(chunks: list[Mapping[str, Any]]) -> Answer:
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    usages = 0
    for chunk in chunks:
        if chunk.get("usage"):
            usage, usages = counts(chunk["usage"]), usages + 1
        for choice in chunk["choices"]:
            empty: dict[str, Any] = {"text": "", "tool_calls": [], "logprobs": None, "token_ids": []}
            joined = choices.setdefault(choice["index"], empty)
            delta = choice.get("delta", {"content": choice.get("text")})
            joined["text"] += delta.get("content") or ""
            join_calls(joined["tool_calls"], delta.get("tool_calls") or [])
            joined["token_ids"] += choice.get("token_ids") or []
            if choice["logprobs"] is not None:
                into = joined["logprobs"] or {name: [] for name in choice["logprobs"]}
                joined["logprobs"] = {name: into[name] + new for name, new in choice["logprobs"].items()}
            joined |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return Answer(200, [choices[index] for index in sorted(choices)], usage, usages=usages)


def join_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if "id" in delta:
            call = {"id": bool(delta["id"]), "type": delta["type"], "function": dict(delta["function"])}
            calls.append(call)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Without what is cached, which depends on who was there before."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def difference(left: Any, right: Any, path: str = "") -> str:
    """Where two answers first differ; numbers that are no whole ones may differ by rounding. Empty: nowhere."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{path}: {sorted(left)} and {sorted(right)}"
        return next((d for key in left if (d := difference(left[key], right[key], f"{path}.{key}"))), "")
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{path}: {len(left)} and {len(right)} items"
        pairs = enumerate(zip(left, right, strict=True))
        return next((d for i, pair in pairs if (d := difference(*pair, f"{path}[{i}]"))), "")
    if isinstance(left, float) and isinstance(right, float) and abs(left - right) <= LOGPROB_TOLERANCE:
        return ""
    return "" if left == right else f"{path}: {left!r} and {right!r}"


async def judge(row: Row, together: Client, alone: Client, plain: Answer) -> str:
    """Empty when the row holds."""
    body = body_of(row, plain)
    reference, answer = await asyncio.gather(alone.ask(row.path, body), together.ask(row.path, body))
    if found := difference(vars_of(reference), vars_of(answer)):
        return f"alone and through P/D: {found}"
    if row.refused:
        named = 400 <= answer.status < 500 and str(answer.error["param"]).startswith(row.refused)
        return "" if named and row.refused in answer.error["message"] else f"not refused by name: {answer}"
    if answer.status != 200:
        return f"refused: {answer.error}"
    if row.streams and not body.get("stream"):
        streamed = await together.ask(row.path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        if found := difference(vars_of(answer), vars_of(streamed)):
            return f"whole and streamed: {found}"
    return "" if row.check(answer, plain) else f"the field did not do what it says: {answer.choices}"


def vars_of(answer: Answer) -> dict[str, Any]:
    return {"status": answer.status, "choices": answer.choices, "usage": answer.usage or None, "error": answer.error}


async def matrix(deployment: Deployment, http: aiohttp.ClientSession, only: str) -> int:
    rows = [row for row in ROWS if only in row.field]
    together = Client(await deployment.router("p", "d"), http)
    alone = Client(await deployment.router("d"), http)
    plain = {
        path: await alone.ask(path, body_of(Row("", path, {}, lambda *_: True), Answer(200)))
        for path in {row.path for row in ROWS}
    }
    async with Spent(deployment, "p", "d") as spent:
        verdicts = await asyncio.gather(*(judge(row, together, alone, plain[row.path]) for row in rows))
    table: Counter[tuple[str, str, str]] = Counter()
    for row, verdict in zip(rows, verdicts, strict=True):
        kind = "FAILED" if verdict else "4xx, named" if row.refused else "equal"
        table[row.field, "chat" if row.path != COMPLETIONS else "completions", kind] += 1
    show(table)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict:
            print(f"FAILED {row.path} {row.field} {row.asked}: {verdict}")  # noqa: T201
    failed = sum(map(bool, verdicts))
    equal = sum(not verdict and not row.refused for row, verdict in zip(rows, verdicts, strict=True))
    missing = uncovered()
    broken = await failovers(deployment, http)
    lost = spent.local_prefills("d").keys() - {"no_prefill_node", "prompt_logprobs"}
    print(  # noqa: T201
        f"matrix: {len(rows)} requests of {len({row.field for row in rows})} fields: {equal} equal through P/D, alone and "
        f"streamed, {len(rows) - equal - failed} refused by name, {failed} failed; fields without a row: {missing or 'none'}; "
        f"{spent.moved('d') >> 20} MiB of KV carried; transfers that failed: {sorted(lost) or 'none'}; "
        f"{len(FAILOVERS) - broken} of {len(FAILOVERS)} JSON objects whole after a failover in their middle"
    )
    return 1 if failed or broken or missing or lost else 0


def show(table: Counter[tuple[str, str, str]]) -> None:
    """One line a field."""
    print(f"{'field':32} {'completions':>22} {'chat':>22}")  # noqa: T201
    for name in sorted({name for name, _, _ in table}):
        cells = []
        for path in ("completions", "chat"):
            kinds = [
                f"{count} {kind}" for (field, where, kind), count in table.items() if (field, where) == (name, path)
            ]
            cells.append(", ".join(kinds) or "-")
        print(f"{name:32} {cells[0]:>22} {cells[1]:>22}")  # noqa: T201


async def failovers(deployment: Deployment, http: aiohttp.ClientSession) -> int:
    """Answers under a JSON schema whose decode node is killed while the object is open; how many are not as unharmed ones."""
    schema = {"type": "json_schema", "json_schema": {"name": "tour", "schema": TOUR}}
    alive: list[str] = []
    broken = started = 0
    for asked in FAILOVERS:
        while len(alive) < DECODERS:
            alive.append(f"failover-{started}")
            started += 1
        router = await deployment.router_named("+".join(alive), "p", *alive, **dict.fromkeys(alive, DECODER))
        body = {"prompt": PROMPT, "max_tokens": 150, "response_format": schema, **asked, "stream": True}
        unharmed = join_stream([chunk async for chunk in streamed(http, router, body)])
        chunks: list[Mapping[str, Any]] = []
        async for chunk in streamed(http, router, body):
            chunks.append(chunk)
            if len(chunks) == KILL_AFTER_CHUNKS:
                victim = await asyncio.to_thread(serving, router)
                (killed,) = [name for name in alive if deployment.node(name).name == victim]
                deployment.node(killed).end()
                alive.remove(killed)
        answer = join_stream(chunks)
        if len(alive) == DECODERS or not is_tour(answer.text) or difference(vars_of(unharmed), vars_of(answer)):
            print(f"FAILED failover of {asked}: {answer.choices}, unharmed {unharmed.choices}")  # noqa: T201
            broken += 1
    return broken


async def streamed(http: aiohttp.ClientSession, router: RouterProcess, body: Mapping[str, Any]) -> Any:
    async with http.post(router.url + COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()
        async for chunk in events(response):
            yield chunk


def serving(router: RouterProcess) -> str:
    """The one decode node that has an attempt of this router."""
    with urllib.request.urlopen(f"{router.url}/health", timeout=5) as answer:
        nodes = json.loads(answer.read())["nodes"]
    (busy,) = [node["node"] for node in nodes if node["role"] == "decode" and node["attempts"]]
    return str(busy)


def is_tour(text: str) -> bool:
    found = json.loads(text)
    bridges = found["bridges"]
    return set(found) == {"city", "bridges"} and 4 <= len(bridges) <= 6 and all(len(one) <= 12 for one in bridges)


async def run(folder: Path, model: Path, only: str) -> int:
    deployment = MatrixDeployment(folder, model)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)) as http:
            return await matrix(deployment, http, only)
    finally:
        deployment.end()


def main() -> int:
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--only", default="", help="rows whose field holds this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="decant-matrix-") as folder:
        return asyncio.run(run(Path(folder), arguments.model or ensure_default_model(), arguments.only))


if __name__ == "__main__":
    sys.exit(main())
