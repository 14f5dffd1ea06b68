"""`make clients`: programs that others wrote, unmodified, against a router with a prefill and a decode node and a real model.

Each runs to its end without an error, and what it reports is put beside what the router counted meanwhile: requests, tokens of
prompts and answers (all of them take those from `usage`), and the mean time to first token, which a client sees a little later.
aiperf and guidellm get virtual environments of their own below build/clients, from PyPI; vLLM's client is taken from --peer-venv.
Prints one table and a closing line; the exit code is 1 where a program failed or does not agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment import Deployment, RouterProcess
from pd_nodes import Metrics

from decant.default_model import ensure_default_model

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "clients"
REQUESTS, AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 12, 4, 96, 32
PROGRAM_LIMIT_S = 600.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TTFT_SLACK_S = 0.5
"""Between a router's first token and the moment at which a client says it had it, on a busy machine."""


@dataclass(frozen=True)
class Counted:
    requests: int
    prompt_tokens: int | None
    completion_tokens: int
    ttft_s: float | None
    """Mean over all requests."""


@dataclass(frozen=True)
class Setting:
    """What every program is told."""

    url: str
    model: str
    tokenizer: Path
    out: Path


@dataclass(frozen=True)
class Program:
    name: str
    executable: Callable[[Path], Path]
    arguments: Callable[[Setting], list[str]]
    report: Callable[[Setting, str], Counted]
    """What it says of its run, from its files or its output. Fails where it says that a request failed."""
    offline: bool = True
    """It is told that there is no hub; aiperf then takes no folder either."""


# --- openai


def openai_arguments(setting: Setting) -> list[str]:
    return [str(Path(__file__).with_name("openai_session.py")), setting.url, setting.model]


def openai_report(setting: Setting, output: str) -> Counted:
    found = json.loads(output.strip().splitlines()[-1])
    return Counted(found["requests"], found["prompt_tokens"], found["completion_tokens"], found["ttft_s"])


# --- vLLM


def vllm_arguments(endpoint: str, backend: str) -> Callable[[Setting], list[str]]:
    def arguments(setting: Setting) -> list[str]:
        return [
            *("bench", "serve", "--backend", backend, "--base-url", setting.url, "--endpoint", endpoint),
            *("--model", setting.model, "--tokenizer", str(setting.tokenizer), "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS), "--ignore-eos"),
            *("--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE), "--disable-tqdm"),
            *("--save-result", "--result-dir", str(setting.out), "--result-filename", "vllm.json"),
        ]

    return arguments


def vllm_report(setting: Setting, output: str) -> Counted:
    found = json.loads((setting.out / "vllm.json").read_text())
    assert found["failed"] == 0, f"{found['failed']} requests failed"
    return Counted(
        found["completed"], found["total_input_tokens"], found["total_output_tokens"], found["mean_ttft_ms"] / 1000
    )


# --- aiperf


def aiperf_arguments(setting: Setting) -> list[str]:
    return [
        *("profile", "--model", setting.model, "--tokenizer", str(setting.tokenizer), "--url", setting.url),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--random-seed", "7", "--ui", "none"),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(ANSWER_TOKENS), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{ANSWER_TOKENS}"),
        *("--request-count", str(REQUESTS), "--concurrency", str(AT_ONCE), "--artifact-dir", str(setting.out)),
    ]


def aiperf_report(setting: Setting, output: str) -> Counted:
    (file,) = setting.out.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    errors = found.get("error_request_count") or {"avg": 0}
    assert not errors["avg"], f"{errors['avg']} requests failed"
    return Counted(
        requests=round(found["request_count"]["avg"]),
        prompt_tokens=_total(found, "total_isl", "input_sequence_length"),
        completion_tokens=_total(found, "total_osl", "output_sequence_length"),
        ttft_s=found["time_to_first_token"]["avg"] / 1000,
    )


def _total(found: dict[str, Any], total: str, each: str) -> int:
    count = found[total]["avg"] if total in found else found[each]["avg"] * found["request_count"]["avg"]
    total_tokens: int = round(count)
    return total_tokens


# --- guidellm


def guidellm_arguments(setting: Setting) -> list[str]:
    return [
        *(
            "run",
            "--disable-console-interactive",
            "--backend",
            f"kind=openai_http,target={setting.url},model={setting.model}",
        ),
        *("--tokenizer", f"kind=huggingface_auto,model={setting.tokenizer}"),
        *("--profile", f"kind=concurrent,streams={AT_ONCE}", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--output", f"kind=json,path={setting.out / 'guidellm.json'}"),
    ]


def guidellm_report(setting: Setting, output: str) -> Counted:
    (benchmark,) = json.loads((setting.out / "guidellm.json").read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert not benchmark["requests"]["errored"], benchmark["requests"]["errored"][:1]
    return Counted(
        requests=len(done),
        prompt_tokens=sum(one["prompt_tokens"] for one in done),
        completion_tokens=sum(one["output_tokens"] for one in done),
        ttft_s=sum(one["time_to_first_token_ms"] for one in done) / len(done) / 1000,
    )


def own_venv(name: str, requirement: str, *, torch: bool = False) -> Callable[[Path], Path]:
    """Made once. `torch`: it wants one, and gets the build for CPUs."""

    def executable(_: Path) -> Path:
        folder = BUILD / name
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = folder / "bin" / "python"
            if torch:
                subprocess.run([ROOT / "deploy" / "install_torch.sh", python, "cpu", "2.13.0", TORCH_INDEX], check=True)
            install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", requirement]
            subprocess.run([python, *install], check=True)
            (folder / "done").touch()
        return folder / "bin" / name

    return executable


TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRAMS = (
    Program("openai", lambda _: Path(sys.executable), openai_arguments, openai_report),
    Program(
        "vllm bench serve (chat)",
        lambda peer: peer / "bin" / "vllm",
        vllm_arguments("/v1/chat/completions", "openai-chat"),
        vllm_report,
    ),
    Program(
        "vllm bench serve (completions)",
        lambda peer: peer / "bin" / "vllm",
        vllm_arguments("/v1/completions", "openai"),
        vllm_report,
    ),
    Program("aiperf", own_venv("aiperf", "aiperf==0.13.0"), aiperf_arguments, aiperf_report, offline=False),
    Program("guidellm", own_venv("guidellm", "guidellm==0.8.1", torch=True), guidellm_arguments, guidellm_report),
)


@dataclass(frozen=True)
class Comparison:
    program: Program
    client: Counted | None
    router: Counted
    problem: str


async def counted(router: RouterProcess, before: Metrics | None = None) -> tuple[Metrics, Counted]:
    """The router's metrics, and what they grew by since `before`."""
    now = await router_metrics(router)

    def grown(name: str, **labels: str) -> float:
        return now.value(name, **labels) - (before.value(name, **labels) if before is not None else 0.0)

    ended = sum(grown("request_success_total", reason=reason) for reason in ("stop", "length"))
    failed = grown("request_success_total", reason="failed")
    assert failed == 0, f"the router counted {failed:.0f} failed requests"
    firsts = grown("time_to_first_token_seconds_count")
    ttft_s = grown("time_to_first_token_seconds_sum") / firsts if firsts else None
    prompt, completion = grown("prompt_tokens_total"), grown("generation_tokens_total")
    return now, Counted(round(ended), round(prompt), round(completion), ttft_s)


async def router_metrics(router: RouterProcess) -> Metrics:
    def get() -> str:
        from urllib.request import urlopen

        with urlopen(f"{router.url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    return Metrics(await asyncio.to_thread(get))


async def run_program(program: Program, router: RouterProcess, setting: Setting, peer_venv: Path) -> Comparison:
    executable = await asyncio.to_thread(program.executable, peer_venv)
    before, _ = await counted(router)
    log = setting.out / "output.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(OFFLINE if program.offline else {})}
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            executable, *program.arguments(setting), stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        code = await asyncio.wait_for(process.wait(), PROGRAM_LIMIT_S)
    _, found = await counted(router, before)
    output = log.read_text(errors="replace")
    if code != 0:
        return Comparison(program, None, found, f"ended with {code}: {output[-2000:]}")
    try:
        client = program.report(setting, output)
    except (AssertionError, KeyError, ValueError, FileNotFoundError) as error:
        return Comparison(program, None, found, f"its report: {type(error).__name__}: {error}; {output[-1500:]}")
    return Comparison(program, client, found, disagreement(client, found))


def disagreement(client: Counted, router: Counted) -> str:
    """Empty when both say the same."""
    if client.requests != router.requests:
        return f"{client.requests} requests, the router counted {router.requests}"
    if client.completion_tokens != router.completion_tokens:
        return f"{client.completion_tokens} tokens of answers, the router counted {router.completion_tokens}"
    if client.ttft_s is not None and router.ttft_s is not None:
        later = client.ttft_s - router.ttft_s
        if not 0 <= later <= TTFT_SLACK_S:
            return f"first tokens after {client.ttft_s:.3f} s, by the router's count {router.ttft_s:.3f} s"
    if client.prompt_tokens != router.prompt_tokens:
        return f"{client.prompt_tokens} tokens of prompts, the router counted {router.prompt_tokens}"
    return ""


def show(comparisons: list[Comparison]) -> None:
    print(f"{'program':32} {'requests':>14} {'prompt tokens':>16} {'answer tokens':>16} {'mean TTFT, ms':>16}")  # noqa: T201

    def both(left: object, right: object) -> str:
        return f"{left} | {right}"

    for one in comparisons:
        client, router = one.client, one.router
        if client is None:
            print(f"{one.program.name:32} FAILED: {one.problem}")  # noqa: T201
            continue
        ttft = [f"{1000 * value:.0f}" if value is not None else "-" for value in (client.ttft_s, router.ttft_s)]
        print(  # noqa: T201
            f"{one.program.name:32} {both(client.requests, router.requests):>14} "
            f"{both(client.prompt_tokens, router.prompt_tokens):>16} "
            f"{both(client.completion_tokens, router.completion_tokens):>16} {both(*ttft):>16}"
            + (f"  DISAGREES: {one.problem}" if one.problem else "")
        )


async def run(folder: Path, model: Path, peer_venv: Path, only: str) -> int:
    deployment = Deployment(folder, model)
    comparisons = []
    try:
        router = await deployment.router("p", "d")
        for program in PROGRAMS:
            if only not in program.name:
                continue
            out = folder / program.name.replace(" ", "-")
            out.mkdir()
            setting = Setting(router.url, model.name, model, out)
            comparisons.append(await run_program(program, router, setting, peer_venv))
    finally:
        deployment.end()
    show(comparisons)
    wrong = [one.program.name for one in comparisons if one.problem]
    print(  # noqa: T201
        f"clients (left what the client says, right the router): {len(comparisons)} programs, {wrong or 'none'} wrong"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--peer-venv", type=Path, required=True, help="where vLLM's client is")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="decant-clients-") as folder:
        model = arguments.model or ensure_default_model()
        return asyncio.run(run(Path(folder), model, arguments.peer_venv, arguments.only))


if __name__ == "__main__":
    sys.exit(main())
