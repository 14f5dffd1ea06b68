"""A prefill node killed in mid-transfer, on Decant and on vLLM: `python -m bench.kill_beside_vllm --peer-venv DIR --model DIR`.

The same on both: float32, greedy, prefix caches off, one prefill, one decode, a router in front; vLLM's decode with
`kv_load_failure_policy: recompute`. A few long prompts are answered one by one without harm, which is the reference. Then all of
them are asked at once, and SIGKILL ends the prefill process, and every process it started, as soon as a share of one prompt's KV
has crossed the loopback interface of a network namespace in which nothing else runs (so UCX is left TCP alone). Nobody starts it
again; one more request is asked when all have ended.

Told of each system: client errors, answers that differ from the unharmed ones, and how long after the kill streams went on.

Must be root (network namespaces).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from bench import peer
from bench.peer import Running, make_prompts
from bench.processes import System

PROMPT_TOKENS = (1000, 1300, 1600, 1900)
OUTPUT_TOKENS = 32
ANSWER_LIMIT_S = 300.0
OWN_NAMESPACE = "BENCH_OWN_NETWORK"


@dataclass(slots=True)
class Told:
    """What one client saw. Times by time.monotonic()."""

    asked_s: float
    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    error: str = ""
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`next_token_s`: of each stream that was answered in spite of the kill, from the kill to its next token, which for most is
    their first. `different`: answered, but not as without harm."""

    system: str
    asked: int
    moved_mib: float
    errors: list[str]
    different: int
    next_token_s: list[float]
    unharmed_first_token_s: list[float]
    afterwards: str


async def ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> Told:
    """One greedy streamed completion; what goes wrong is told, not raised."""
    told = Told(time.monotonic())
    body = {"model": "m", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                told.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            async for line in response.content:
                _hear(told, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        told.error = repr(error)
    told.ended_s = time.monotonic()
    if not told.error and told.tokens != OUTPUT_TOKENS:
        told.error = f"{told.tokens} tokens instead of {OUTPUT_TOKENS}"
    return told


def _hear(told: Told, line: bytes) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        told.error = str(event["error"])[:200]
        return
    if event.get("usage"):
        told.tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        if choice["text"]:
            told.pieces_s.append(time.monotonic())
            told.text += choice["text"]


def received_bytes() -> int:
    """By the loopback interface of this network namespace."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


async def kill_in_transfer(system: System, prefill: str, enough_bytes: int) -> tuple[float, int]:
    """When it was killed, and how many bytes had crossed the interface by then."""
    before, deadline = received_bytes(), time.monotonic() + ANSWER_LIMIT_S
    while received_bytes() - before < enough_bytes:
        assert time.monotonic() < deadline, "no KV ever moved: nothing was killed in mid-transfer"
        await asyncio.sleep(0.001)
    moved = received_bytes() - before
    process = system.processes.pop(prefill)
    os.killpg(process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    await asyncio.to_thread(process.wait)
    return killed_s, moved


async def harm(
    running: Running, name: str, prefill: str, prompts: Sequence[Sequence[int]], enough_bytes: int
) -> Outcome:
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await ask(session, running.url, prompts[0][:64])
        unharmed = [await ask(session, running.url, prompt) for prompt in prompts]
        for told in unharmed:
            assert not told.error, f"{name} fails without any harm: {told.error}"
        killing = asyncio.create_task(kill_in_transfer(running.system, prefill, enough_bytes))
        harmed = await asyncio.gather(*(ask(session, running.url, prompt) for prompt in prompts))
        killed_s, moved = await killing
        last = await ask(session, running.url, prompts[0][:256])
    answered = [(told, usual) for told, usual in zip(harmed, unharmed, strict=True) if not told.error]
    return Outcome(
        system=name,
        asked=len(prompts),
        moved_mib=moved / 2**20,
        errors=[told.error for told in harmed if told.error],
        different=sum(told.text != usual.text for told, usual in answered),
        next_token_s=[_next_token_s(told, killed_s) for told, _ in answered if told.ended_s > killed_s],
        unharmed_first_token_s=[told.pieces_s[0] - told.asked_s for told in unharmed],
        afterwards=last.error or f"answered, first token after {last.pieces_s[0] - last.asked_s:.2f} s",
    )


def _next_token_s(told: Told, killed_s: float) -> float:
    return next((at for at in told.pieces_s if at > killed_s), told.ended_s) - killed_s


def in_words(outcome: Outcome) -> str:
    def seconds(figures: Iterable[float]) -> str:
        return ", ".join(f"{figure:.2f}" for figure in sorted(figures)) or "-"

    return (
        f"{outcome.system}: killed after {outcome.moved_mib:.1f} MiB; of {outcome.asked} streams {len(outcome.errors)} errors, "
        f"{outcome.different} different answers; s from the kill to the next token: {seconds(outcome.next_token_s)} "
        f"(unharmed, one at a time, s to the first token: {seconds(outcome.unharmed_first_token_s)}); a request afterwards: "
        f"{outcome.afterwards}" + "".join(f"\n    {error}" for error in outcome.errors)
    )


def in_a_network_of_its_own() -> None:
    """Start this program again where nothing else uses the loopback interface."""
    if os.environ.get(OWN_NAMESPACE):
        return
    script = 'ip link set lo up && exec "$@"'
    command = [
        "unshare",
        "--net",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-m",
        "bench.kill_beside_vllm",
        *sys.argv[1:],
    ]
    os.execvpe(command[0], command, {**os.environ, OWN_NAMESPACE: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-venv", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--system", choices=("decant", "vllm"), action="append")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS)
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the shortest prompt's KV that moves before the kill"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench-kill"))
    arguments = parser.parse_args()
    in_a_network_of_its_own()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    for environment in (peer.VLLM_ENVIRONMENT, peer.DECANT_ENVIRONMENT):
        environment["UCX_TLS"] = "tcp,self"
    venv, model, output = arguments.peer_venv, arguments.model, arguments.output
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    enough_bytes = int(arguments.share * min(arguments.prompt_tokens) * token_bytes)
    prompts = [make_prompts(1, tokens, seed)[0] for seed, tokens in enumerate(arguments.prompt_tokens)]
    systems: dict[str, tuple[str, AbstractContextManager[Running]]] = {
        "decant": ("prefill", peer.decant(model, output / "decant", "0", "1")),
        "vllm": ("vllm-prefill", peer.vllm_pd(venv, model, output / "vllm", load_failure_policy="recompute")),
    }
    outcomes = []
    for name in arguments.system or systems:
        prefill, starting = systems[name]
        with starting as running:
            outcomes.append(asyncio.run(harm(running, name, prefill, prompts, enough_bytes)))
        sys.stdout.write(in_words(outcomes[-1]) + "\n")
        sys.stdout.flush()
    output.mkdir(parents=True, exist_ok=True)
    (output / "outcomes.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
