"""Child processes of `decant up`: started, watched, started again when killed, and never left behind.

The supervisor is one thread that waits for signals (SIGINT, SIGTERM, SIGCHLD) and acts between them. Children lead process
groups of their own, so that an interrupt at the terminal reaches only the supervisor, which stops them in order; the kernel
kills them when the supervisor itself is killed.

Invariants: a child is started again at most `RESTARTS` times within `RESTART_WINDOW_S`, and never after an orderly exit or a
wrong setting; after `stop` no child runs.

Must not know: what the children do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from foundation.errors import ConfigurationError, SetupError

RESTARTS = 5
RESTART_WINDOW_S = 60.0
LOOK_EVERY_S = 0.2
PENDING_EVERY_S = 0.02
PROBE_TIMEOUT_S = 2.0
KILL_AFTER_GRACE_S = 5.0

_WATCHED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
_PR_SET_PDEATHSIG = 1
_OWN_CHILD = ssl.create_default_context()
"""Asks a child on this machine, by its address: its certificate names what clients dial."""
_OWN_CHILD.check_hostname, _OWN_CHILD.verify_mode = False, ssl.CERT_NONE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How to run one child, and the URL that answers 200, with a body that `is_ready` accepts, once it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    health_url: str
    is_ready: Callable[[bytes], bool] = lambda body: True


@dataclass
class _Child:
    plan: ChildPlan
    process: subprocess.Popen[bytes]
    ready: bool = False
    restarts_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS))


class Interrupted(Exception):
    """SIGINT or SIGTERM came."""


class Supervisor:
    """Runs children in the order of `plans`; `stop` ends them in that order too, the first one before the others."""

    def __init__(self, plans: Sequence[ChildPlan], grace_s: float) -> None:
        self._plans = plans
        self._grace_s = grace_s
        self._children: list[_Child] = []
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def start(self, limit_s: float) -> None:
        """Start all and wait until each is ready.

        Raises SetupError when one ends or `limit_s` passes first (ConfigurationError when one ends because a setting is
        wrong), Interrupted on a signal.
        """
        for plan in self._plans:  # one by one: what has been started is stopped even if the next cannot be
            self._children.append(_Child(plan, _spawn(plan)))
        deadline_s = time.monotonic() + limit_s
        while not all(child.ready for child in self._children):
            self._await_signal(LOOK_EVERY_S)
            for child in self._children:
                code = child.process.poll()
                if code is not None:
                    raise _start_failure(child.plan.name, code)
                child.ready = child.ready or _is_ready(child.plan)
            if time.monotonic() > deadline_s:
                late = ", ".join(child.plan.name for child in self._children if not child.ready)
                raise SetupError(f"not ready within {limit_s:.0f} s: {late}")

    def watch(self) -> NoReturn:
        """Keep all running until a signal raises Interrupted. Raises SetupError when one cannot be kept running."""
        while True:
            self._await_signal(None)
            for child in self._children:
                code = child.process.poll()
                if code is not None:
                    self._start_again(child, code)

    def stop(self) -> None:
        """End every child: SIGTERM, the first child before the others; SIGKILL after the grace, or on another signal."""
        try:
            for group in (self._children[:1], self._children[1:]):
                for child in group:
                    child.process.terminate()
                self._await_exits(group)
        except Interrupted:
            pass
        for child in self._children:
            child.process.kill()
            child.process.wait()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    def _start_again(self, child: _Child, code: int) -> None:
        now_s = time.monotonic()
        recently = [at_s for at_s in child.restarts_at_s if now_s - at_s < RESTART_WINDOW_S]
        if code == ConfigurationError.exit_code or len(recently) == RESTARTS:
            raise SetupError(f"{child.plan.name} {_ending(code)} and does not stay up")
        sys.stderr.write(f"decant up: {child.plan.name} {_ending(code)}; starting it again\n")
        child.restarts_at_s.append(now_s)
        child.process = _spawn(child.plan)

    def _await_exits(self, group: Sequence[_Child]) -> None:
        deadline_s = time.monotonic() + self._grace_s + KILL_AFTER_GRACE_S
        while any(child.process.poll() is None for child in group) and time.monotonic() < deadline_s:
            self._await_signal(LOOK_EVERY_S)

    def _await_signal(self, limit_s: float | None) -> None:
        """Return on SIGCHLD or after `limit_s`; raise Interrupted on the others.

        Not by sigtimedwait: interrupted by a stop that outlasts its time (Ctrl-Z and fg), Python's returns what no signal wrote.
        """
        if limit_s is not None:
            deadline_s = time.monotonic() + limit_s
            while not signal.sigpending() & _WATCHED:
                if time.monotonic() >= deadline_s:
                    return
                time.sleep(PENDING_EVERY_S)
        if signal.sigwaitinfo(_WATCHED).si_signo != signal.SIGCHLD:
            raise Interrupted


def _spawn(plan: ChildPlan) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def tie_to_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    # The supervisor has one thread, so running Python between fork and exec is safe.
    return subprocess.Popen(
        plan.command,
        env=dict(plan.environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=tie_to_parent,
    )


def _is_ready(plan: ChildPlan) -> bool:
    try:
        with urllib.request.urlopen(plan.health_url, timeout=PROBE_TIMEOUT_S, context=_OWN_CHILD) as answer:
            return answer.status == 200 and plan.is_ready(answer.read())
    except (urllib.error.URLError, OSError):
        return False


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _start_failure(name: str, code: int) -> SetupError | ConfigurationError:
    if code == ConfigurationError.exit_code:
        return ConfigurationError(name, "did not start; its message stands above")
    return SetupError(f"{name} {_ending(code)} before it was ready")
