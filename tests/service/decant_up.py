"""`decant up` in a process of its own, on ports of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pd_nodes import inherited

from bench.ports import free_ports, is_free

START_LIMIT_S = 90.0
LIMIT_S = 45.0


class Up:
    """`output` is what it printed, the file `log` in `folder` what it logged."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.node_index, self.http_port, self.grpc_port = _free_places()
        self.folder = folder
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
        environment = {**inherited(), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
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
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # over since it was listed
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
        """Roles of the nodes to which the router gives work."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/health", timeout=LIMIT_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as refused:
            body = refused.read()
        nodes: list[dict[str, Any]] = json.loads(body)["nodes"]
        return {node["role"] for node in nodes if node["refusal"] is None}

    def metric(self, port: int, name: str) -> float:
        """One value of /metrics on a port of this cluster."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, f"no metric {name}"
        return float(found[1])

    @property
    def prefill_http_port(self) -> int:
        return 7102 + 10 * self.node_index

    @property
    def decode_http_port(self) -> int:
        return self.prefill_http_port + 10


def _free_places() -> tuple[int, int, int]:
    """A node index whose six ports are free, and two free ports for the router."""
    for _ in range(100):
        index = random.randrange(1500, 2500)
        places = {7100 + 10 * i + k for i in (index, index + 1) for k in range(3)}
        http, grpc = free_ports(2)
        if places.isdisjoint((http, grpc)) and all(map(is_free, places)):
            return index, http, grpc
    raise RuntimeError("no node index with six free ports was found")
