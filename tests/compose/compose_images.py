"""Images for machines that can pull none: stand-ins for the public base images, and Decant's own, built from the Dockerfile.

`debian:bookworm-slim` is a Debian of the minimal variant with documentation left out; so is its stand-in, made by debootstrap
from the machine's own package mirror (minutes, kept in a cache). `redis:7-bookworm` is the same with Debian's redis-server.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compose_engine import BRIDGE_ADDRESS, Engine

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("DECANT_CI_CACHE", "~/.cache/decant-ci")).expanduser()
BASE, REDIS = "debian:bookworm-slim", "redis:7-bookworm"
ROUTER, NODE = "decant/router:dev", "decant/node-cpu:dev"
DEBOOTSTRAP_LIMIT_S = 900.0
BUILD_LIMIT_S = 900.0
FETCH_TRIES = 3

SLIM = """path-exclude /usr/share/doc/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
path-exclude /usr/share/lintian/*
"""
"""What the public slim image leaves out, now and when packages are added."""

REDIS_DOCKERFILE = f"""FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
"""


@dataclass(frozen=True)
class Built:
    """Seconds that each image took."""

    base_s: float
    router_s: float
    node_s: float


def build_all(engine: Engine) -> Built:
    begun = time.monotonic()
    if not engine.docker("images", "--quiet", BASE):  # a kept engine has it, and builds on it are cached
        engine.docker("import", "--change", 'CMD ["bash"]', "-", BASE, stdin=base_archive(), limit_s=300)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(REDIS_DOCKERFILE)
        engine.docker("build", "--quiet", "--tag", REDIS, folder, limit_s=BUILD_LIMIT_S)
    base_s = time.monotonic() - begun
    with wheels_served() as sources:
        router_s = _build(engine, "router", ROUTER, sources)
        node_s = _build(engine, "node-cpu", NODE, sources)
    return Built(base_s, router_s, node_s)


def _build(engine: Engine, target: str, tag: str, arguments: dict[str, str]) -> float:
    begun = time.monotonic()
    given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    command = ("build", "--target", target, "--tag", tag, *given, str(ROOT))
    try:
        engine.docker(*command, limit_s=BUILD_LIMIT_S)
    except AssertionError as failed:  # once more, from the last good layer: a mirror or an index may have hung up
        print(failed)  # noqa: T201
        engine.docker(*command, limit_s=BUILD_LIMIT_S)
    return time.monotonic() - begun


@contextlib.contextmanager
def wheels_served() -> Iterator[dict[str, str]]:
    """Build arguments that make pip look where this machine's own pip looks; a folder of wheels is served to the builder."""
    arguments = {name: os.environ[name] for name in ("PIP_INDEX_URL", "PIP_TRUSTED_HOST") if os.environ.get(name)}
    folders = [path for path in os.environ.get("PIP_FIND_LINKS", "").split() if Path(path).is_dir()]
    if not folders:
        yield arguments
        return
    handler = functools.partial(_Quiet, directory=folders[0])
    with http.server.ThreadingHTTPServer((BRIDGE_ADDRESS, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        trusted = f"{arguments.get('PIP_TRUSTED_HOST', '')} {BRIDGE_ADDRESS}".strip()
        links = f"http://{BRIDGE_ADDRESS}:{server.server_address[1]}/"
        yield arguments | {"PIP_FIND_LINKS": links, "PIP_TRUSTED_HOST": trusted}
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


def base_archive() -> Path:
    """Made once a machine."""
    archive = CACHE / "debian-bookworm-slim.tar"
    if archive.exists():
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".debian-") as scratch:
        root = Path(scratch) / "root"
        command = ["debootstrap", "--variant=minbase", "bookworm", str(root)]
        for more_tries in reversed(range(FETCH_TRIES)):
            shutil.rmtree(root, ignore_errors=True)
            ended = subprocess.run(command, check=not more_tries, capture_output=True, timeout=DEBOOTSTRAP_LIMIT_S)
            if ended.returncode == 0:
                break
        _slim(root)
        _trust_what_this_machine_trusts(root)
        made = Path(scratch) / archive.name
        subprocess.run(["tar", "-C", str(root), "-cf", str(made), "."], check=True, timeout=DEBOOTSTRAP_LIMIT_S)
        made.rename(archive)
    return archive


def _slim(root: Path) -> None:
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(SLIM)
    excluded = [line.split()[1].removesuffix("/*").lstrip("/") for line in SLIM.splitlines()]
    for folder in (*excluded, "var/lib/apt/lists", "var/cache/apt", "var/log"):
        shutil.rmtree(root / folder, ignore_errors=True)
    for folder in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt"):
        (root / folder).mkdir(parents=True)


def _trust_what_this_machine_trusts(root: Path) -> None:
    """A certificate authority of the site's own; ca-certificates, once installed, takes it over."""
    own = Path("/usr/local/share/ca-certificates")
    if own.is_dir():
        shutil.copytree(own, root / "usr/local/share/ca-certificates", dirs_exist_ok=True)
