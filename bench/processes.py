"""Start the processes of a system under test on chosen cores, wait until they answer, and stop every one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class System:
    """A group of processes, each in a session of its own so that children end with it."""

    def __init__(self, log_folder: Path) -> None:
        self.log_folder = log_folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], cores: str, environment: Mapping[str, str]) -> None:
        """Run `command` pinned to `cores` (taskset's list syntax); its output goes to LOG_FOLDER/name.log."""
        with (self.log_folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                ["taskset", "-c", cores, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def await_answer(self, url: str, limit_s: float, enough: Callable[[bytes], bool] = lambda body: True) -> None:
        """Wait until `url` answers 200 and `enough`; RuntimeError when a process ends or the limit passes first."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}: see {self.log_folder}/{name}.log")
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if answer.status == 200 and enough(answer.read()):
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.2)
        raise RuntimeError(f"{url} did not answer within {limit_s:.0f} s")

    def cpu_seconds(self) -> dict[str, float]:
        """User + system time used so far by each process and its live descendants, by name."""
        return {name: _tree_cpu_seconds(process.pid) for name, process in self.processes.items()}

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes.clear()


@contextmanager
def system(log_folder: Path) -> Iterator[System]:
    """A System that is stopped when the block ends, however it ends."""
    log_folder.mkdir(parents=True, exist_ok=True)
    under_test = System(log_folder)
    try:
        yield under_test
    finally:
        under_test.stop()


def _tree_cpu_seconds(root: int) -> float:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    members = {root}
    while grown := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= grown
    return sum(used.get(pid, 0.0) for pid in members)
