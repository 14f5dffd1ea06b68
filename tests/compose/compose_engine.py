"""A Docker engine of the tests' own: its own data, socket and processes, gone without a trace when it is left.

Needs root, dockerd and iptables. In a network namespace the engine has no bridge: what it starts with `network_mode: host` is in
that namespace, as on a machine of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_LIMIT_S = 90.0
STOP_LIMIT_S = 60.0
COMMAND_LIMIT_S = 120.0
BRIDGE = "decant-ci0"
BRIDGE_ADDRESS = "10.215.0.1"
NEEDED = ("dockerd", "docker", "docker-compose", "iptables", "debootstrap", "ip", "nsenter", "setpriv", "unshare")

DIE_WITH_US = ("setpriv", "--pdeathsig", "TERM")
LINK_LAYERS = 'umount --lazy "$1" && cp -al "$1" "$2"'
"""An engine mounts its layers onto themselves, and files have no links from one mount to another."""
EMPTY = {
    "filter": "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\nCOMMIT\n",
    "nat": "*nat\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n",
}
"""The packet filter of a machine where nothing has been filtered yet."""


def why_not_possible() -> str | None:
    """What is missing on this machine, or None when an `Engine` can be started."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Engine:
    """A context manager."""

    def __init__(self, network_namespace: str | None = None) -> None:
        # Not `ip netns exec`, which hides the control groups.
        self._network = [] if network_namespace is None else ["nsenter", f"--net=/run/netns/{network_namespace}"]
        self.folder = Path(tempfile.mkdtemp(prefix="decant-docker-", dir="/var/tmp"))
        self.socket = self.folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._packet_filter = ""
        """As it was before."""

    @property
    def data(self) -> Path:
        """DECANT_COMPOSE_KEEP=folder: images are kept there from run to run, so that a build takes seconds."""
        kept = os.environ.get("DECANT_COMPOSE_KEEP") if not self._network else None
        return Path(kept) if kept else self.folder / "data"

    @property
    def environment(self) -> dict[str, str]:
        """For docker and docker-compose: where the engine is, and nothing of the machine's own settings."""
        kept = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return kept | {"DOCKER_HOST": f"unix://{self.socket}", "COMPOSE_HTTP_TIMEOUT": "600", "DOCKER_BUILDKIT": "0"}

    def __enter__(self) -> Engine:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        network = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        if not self._network:
            self._packet_filter = _output(["iptables-save"])
            _output(["ip", "link", "add", BRIDGE, "type", "bridge"])
            _output(["ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE])
            _output(["ip", "link", "set", BRIDGE, "up"])
            network = [f"--bridge={BRIDGE}", "--default-address-pool=base=10.216.0.0/16,size=24"]
        paths = [f"--data-root={self.data}", f"--exec-root={self.folder}/run", f"--pidfile={self.folder}/pid"]
        command = [
            *self._network,
            *DIE_WITH_US,
            "dockerd",
            f"--host=unix://{self.socket}",
            *paths,
            *network,
            "--shutdown-timeout=10",
        ]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_LIMIT_S
        while subprocess.run(["docker", "version"], env=self.environment, capture_output=True).returncode != 0:
            assert self._process.poll() is None, f"dockerd has ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"dockerd does not answer:\n{self.log()}"
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            for _turn in range(2):  # a builder that was interrupted removes its own containers meanwhile
                self._remove_containers()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_LIMIT_S)
        if not self._network:
            subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
            tables = [
                self._packet_filter,
                *(empty for name, empty in EMPTY.items() if f"*{name}" not in self._packet_filter),
            ]
            subprocess.run(["iptables-restore"], input="".join(tables), text=True, check=True)
        for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            where = mount.split()[1]
            if where.startswith(f"{self.folder}/"):
                subprocess.run(["umount", where], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_containers(self) -> None:
        listed = subprocess.run(["docker", "ps", "-aq"], env=self.environment, capture_output=True, text=True)
        if left := listed.stdout.split():
            subprocess.run(["docker", "rm", "--force", "--volumes", *left], env=self.environment, capture_output=True)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def docker(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S, stdin: Path | None = None) -> str:
        """What it prints. Raises AssertionError with its complaint when it fails."""
        with (stdin or Path("/dev/null")).open("rb") as source:
            done = subprocess.run(
                ["docker", *arguments],
                env=self.environment,
                stdin=source,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        assert done.returncode == 0, f"docker {' '.join(arguments[:4])}: {done.stderr[-3000:]}{done.stdout[-3000:]}"
        return done.stdout.strip()

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.docker("inspect", name))
        return dict(found)

    def image_bytes(self, image: str) -> int:
        return int(self.docker("image", "inspect", "--format", "{{.Size}}", image))

    def take_images_of(self, other: Engine) -> None:
        """The other engine's images, which cost no second copy on disk; both must be at rest, this one not yet started.

        A layer's files never change once they are there, so that hard links serve two engines as well as one; the records of
        what the layers are, are copied.
        """
        assert self._process is None, "an engine reads its data once, when it starts"
        self.data.mkdir(parents=True)
        _output(["cp", "-a", str(other.data / "image"), str(self.data)])
        _output(["unshare", "--mount", "sh", "-c", LINK_LAYERS, "-", str(other.data / "overlay2"), str(self.data)])


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S).stdout
