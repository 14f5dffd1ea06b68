"""`decant up` as a user runs it: three processes, the printed curl line, a killed node, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from decant_up import LIMIT_S, Up

pytestmark = pytest.mark.sockets


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
    assert not list(up.folder.glob("decant-*"))


def _await(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)
