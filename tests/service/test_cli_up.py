"""`decant up` as a user runs it: three processes, the printed curl line, a killed node, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sockets

START_LIMIT_S = 60.0
LIMIT_S = 20.0


class Up:
    """`decant up` in a process of its own, on ports of its own; `output` is what it printed, `log` what it logged."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.node_index, self.http_port, self.grpc_port = _free_places()
        self._log = folder / "log"
        command = [
            sys.executable,
            "-m",
            "decant",
            "up",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
        ]
        command += [f"--node-index={self.node_index}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        self.output = ""

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        overdue = threading.Timer(START_LIMIT_S, self.process.kill)
        overdue.start()
        for line in self.process.stdout:
            self.output += line
            if "Ctrl-C stops it" in line:
                overdue.cancel()
                return
        raise AssertionError(f"decant up did not become ready:\n{self._log.read_text()}")

    def children(self) -> dict[str, int]:
        """pid of each living child by the name of its command."""
        found = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if len(words) > 3:  # a zombie has none
                found[words[3]] = int(pid)
        return found

    def ask(self, prompt: str) -> str:
        body = json.dumps({"model": "toy", "prompt": prompt, "max_tokens": 12, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def usable_nodes(self) -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/health", timeout=LIMIT_S) as answer:
            nodes: list[dict[str, Any]] = json.load(answer)["nodes"]
        return {node["role"] for node in nodes if node["refusal"] is None}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"), "--model=toy", "--kv-cache-memory-bytes=8MiB", "--staging-bytes=16MiB")
    try:
        running.await_ready()
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_the_printed_curl_line_gets_an_answer(up: Up) -> None:
    line = re.search(r"^ *(curl .*\\\n.*)$", up.output, re.MULTILINE)
    assert line is not None, up.output
    result = subprocess.run(shlex.split(line[1].replace("\\\n", " ")), capture_output=True, text=True, timeout=LIMIT_S)
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0


def test_the_master_key_is_in_a_file_that_only_its_owner_reads(up: Up) -> None:
    cmdline = Path(f"/proc/{up.children()['router']}/cmdline").read_text()
    key_file = re.search(r"--key-file=([^\0]+)", cmdline)
    assert key_file is not None
    mode = Path(key_file[1]).stat().st_mode & 0o777
    assert mode == 0o600


def test_a_killed_prefill_node_costs_no_answer_and_comes_back(up: Up) -> None:
    before = up.ask("the same prompt")
    victim = up.children()["prefill"]
    os.kill(victim, signal.SIGKILL)
    assert up.ask("the same prompt") == before
    _await(lambda: up.children().get("prefill") not in (None, victim), "the prefill node was not started again")
    _await(lambda: up.usable_nodes() == {"prefill", "decode"}, "the router does not use the new prefill node")
    assert up.ask("the same prompt") == before


def test_an_interrupt_leaves_no_process_and_no_key_behind(up: Up) -> None:
    """The last test here: it ends what the others used."""
    pids = list(up.children().values())
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(LIMIT_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list(up._log.parent.glob("decant-*"))


def _free_places() -> tuple[int, int, int]:
    """A node index whose six ports are free, and two free ports for the router."""
    for _ in range(100):
        index = random.randrange(1500, 2500)
        if all(_is_free(7100 + 10 * i + k) for i in (index, index + 1) for k in range(3)):
            break
    with socket.socket() as http, socket.socket() as grpc:
        http.bind(("127.0.0.1", 0))
        grpc.bind(("127.0.0.1", 0))
        return index, http.getsockname()[1], grpc.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _await(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)
