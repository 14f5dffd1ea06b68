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
NEEDED = ("dockerd", "docker", "docker-compose", "iptables", "debootstrap", "ip", "nsenter", "setpriv")

SHORT_NAMES = "l"
"""Where the overlay2 driver links to its layers by short names, which fit into the options of a mount."""
DIE_WITH_US = ("setpriv", "--pdeathsig", "TERM")
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
    """A context manager. `images_of`: another engine, which outlives this one and has no more images made or removed."""

    def __init__(self, network_namespace: str | None = None, images_of: Engine | None = None) -> None:
        # Not `ip netns exec`, which hides the control groups.
        self._network = [] if network_namespace is None else ["nsenter", f"--net=/run/netns/{network_namespace}"]
        self._images_of = images_of
        self.folder = Path(tempfile.mkdtemp(prefix="decant-docker-", dir="/var/tmp"))
        self.socket = self.folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._packet_filter: str | None = None
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
            if self._images_of is not None:
                self._share_images(self._images_of)
            if not self._network:
                self._packet_filter = _output(["iptables-save"])
                _output(["ip", "link", "add", BRIDGE, "type", "bridge"])
                _output(["ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE])
                _output(["ip", "link", "set", BRIDGE, "up"])
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        network = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        if not self._network:
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
        if self._packet_filter is not None:
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

    def _share_images(self, other: Engine) -> None:
        """This engine has its own records of what the images are, and the other one's layers.

        A layer is read and never written once it is there, so that two engines can stand on one. A link to it costs nothing;
        copies of its files, even hard links, take the longest to be removed again.
        """
        shutil.copytree(other.data / "image", self.data / "image")
        layers = self.data / "overlay2"
        shutil.copytree(other.data / "overlay2" / SHORT_NAMES, layers / SHORT_NAMES, symlinks=True)
        for layer in (other.data / "overlay2").iterdir():
            if layer.name != SHORT_NAMES:
                (layers / layer.name).symlink_to(layer)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S).stdout
