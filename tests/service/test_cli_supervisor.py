"""Children of `decant up`: started again when killed, stopped in order, and never left behind.

The children here are small HTTP servers: the supervisor knows nothing else of a child than its command and its health URL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.ports import free_ports

pytestmark = pytest.mark.sockets

LIMIT_S = 20.0

CHILD = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

PARENT = """
import json, os, sys
from decant.supervisor import ChildPlan, Interrupted, Supervisor
from foundation.errors import StartError
supervisor = Supervisor([ChildPlan(*plan) for plan in json.loads(sys.argv[1])], grace_s=5)
try:
    supervisor.start(60)
    print("ready", flush=True)
    supervisor.watch()
except Interrupted:
    sys.exit(0)
except StartError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
finally:
    supervisor.stop()
"""


LATE = "import time; time.sleep(1)\n" + CHILD


class Parent:
    """A process that supervises two children."""

    def __init__(self, *children: str) -> None:
        self.ports = free_ports(len(children))
        plans = [
            (f"child-{i}", [sys.executable, "-c", code, str(port)], dict(os.environ), f"http://127.0.0.1:{port}/health")
            for i, (code, port) in enumerate(zip(children, self.ports, strict=True))
        ]
        command = [sys.executable, "-c", PARENT, json.dumps(plans)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def child_pid(self, index: int) -> int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[index]}/", timeout=LIMIT_S) as answer:
                return int(answer.read())
        except OSError:
            return None

    def running_child_pids(self) -> list[int]:
        pids = [self.child_pid(index) for index in range(len(self.ports))]
        assert None not in pids
        return [pid for pid in pids if pid is not None]


@pytest.fixture
def parent() -> Iterator[Parent]:
    running = Parent(CHILD, CHILD)
    try:
        running.await_ready()
        yield running
    finally:
        running.process.kill()  # its children die with it, as one test here shows
        running.process.wait()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_child_and_then_the_supervisor(parent: Parent, signal_number: int) -> None:
    pids = parent.running_child_pids()
    parent.process.send_signal(signal_number)
    assert parent.process.wait(LIMIT_S) == 0
    assert not any(_runs(pid) for pid in pids)


def test_children_die_with_a_supervisor_that_is_killed(parent: Parent) -> None:
    pids = parent.running_child_pids()
    parent.process.kill()
    parent.process.wait(LIMIT_S)
    _await(lambda: not any(_runs(pid) for pid in pids), "children still run")


def test_a_killed_child_is_started_again_and_its_neighbour_is_left_alone(parent: Parent) -> None:
    victim, neighbour = parent.running_child_pids()
    os.kill(victim, signal.SIGKILL)
    _await(lambda: parent.child_pid(0) not in (None, victim), "the killed child did not come back")
    assert parent.child_pid(1) == neighbour
    assert _runs(neighbour)


def test_a_child_that_ends_before_it_is_ready_stops_the_start_and_the_others() -> None:
    running = Parent(CHILD, "import sys; sys.exit(3)")
    out, _ = running.process.communicate(timeout=LIMIT_S)
    assert out == "child-1 ended with exit code 3 before it was ready\n"
    assert running.process.returncode == 1
    assert running.child_pid(0) is None


def test_a_supervisor_that_is_stopped_and_goes_on_while_it_starts_its_children_starts_them() -> None:
    """As by Ctrl-Z and fg. Python's sigtimedwait tells of a signal that never came when it is over by then."""
    running = Parent(LATE, LATE)
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    try:
        _await(lambda: len(children.read_text().split()) == 2, "the children were not started")
        for _ in range(2):
            running.process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)  # longer than it waits in one go
            running.process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        running.await_ready()
    finally:
        running.process.kill()
        running.process.wait()


def test_a_child_with_a_wrong_setting_ends_the_start_with_exit_code_2() -> None:
    running = Parent(CHILD, "import sys; sys.exit(2)")
    running.process.communicate(timeout=LIMIT_S)
    assert running.process.returncode == 2


def test_a_child_that_does_not_stay_up_ends_the_supervisor(parent: Parent) -> None:
    seen: set[int] = set()
    while parent.process.poll() is None:
        pid = parent.child_pid(0)
        if pid is not None and pid not in seen:
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert len(seen) < 20, "started again without end"
    assert parent.process.wait() == 1
    assert parent.child_pid(1) is None


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _await(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.02)
