"""`decant` processes that start in a quarter of the time: forked from a process that has already imported everything.

Each is a process of its own, with its own pid, log and environment, and lives as under `python -m decant`. What is not shown is
how the interpreter itself starts and ends, and its command line: tests of these start `python -m decant`.

UCX reads the environment when it is loaded, so it must not be among what was imported before the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

PRELOADED = ["decant.processes", "prefill_node.main", "decode_node.main", "router.main"]
"""What is not there would be left out in silence, and found missing only by the time that starting takes."""

_context = multiprocessing.get_context("forkserver")


class ForkedDecant:
    """`decant ARGUMENTS`, with what tests of nodes use of `subprocess.Popen`. It ends with this process at the latest."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        _context.set_forkserver_preload(PRELOADED)
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # libraries start their threads before the fork
            forkserver.ensure_running()
        target = (list(arguments), dict(environment), str(log))
        self._process = _context.Process(target=_run, args=target, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._one_reads = threading.Lock()

    def poll(self) -> int | None:
        """As of `Popen`: the exit code, less than zero for a signal; None while it lives."""
        with self._one_reads:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        exit_code = self.poll()
        if exit_code is None:
            raise TimeoutError(f"process {self.pid} lives after {timeout} s")
        return exit_code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _end_with_the_tests() -> None:
    """Also where they were killed."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    assert "libucx" not in sys.modules
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    from decant.command_line import run

    sys.exit(run(arguments, os.environ))
