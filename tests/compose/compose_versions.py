"""Programs of Compose: 1.29, Debian's own, which is installed; 2, taken out of a newer Debian's package, which is not."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from compose_images import CACHE, ROOT

COMPOSE_1 = "docker-compose"
TRIXIE = "trixie"
"""The release of Debian whose `docker-compose` is Compose 2."""
FETCH_LIMIT_S = 300.0


def compose_2() -> str:
    """The program, kept in a cache. Raises OSError or subprocess.SubprocessError where the package cannot be had."""
    tool = CACHE / "compose-2" / "usr" / "libexec" / "docker" / "cli-plugins" / "docker-compose"
    if not tool.exists():
        _fetch(tool.parents[4])
    return str(tool)


def version_of(tool: str) -> str:
    return _run([tool, "version", "--short"]).removeprefix("v")


def _fetch(folder: Path) -> None:
    """From the mirror that this machine's own packages come from, beside its package lists. Raises CalledProcessError."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".compose-2-") as name:
        scratch = Path(name)
        main = ("Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main")
        mirrors = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", *main]).split()
        if not mirrors:
            raise FileNotFoundError("this machine has no mirror of Debian")
        signed = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
        (scratch / "sources.list").write_text(f"deb [{signed}] {mirrors[0]} {TRIXIE} main\n")
        (scratch / "lists" / "partial").mkdir(parents=True)
        settings = {
            "Dir::Etc::SourceList": scratch / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": scratch / "lists",
            "Dir::Cache": scratch,
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        apt = ["apt-get", "-qq", *(part for key, value in settings.items() for part in ("-o", f"{key}={value}"))]
        _run([*apt, "update"])
        _run([*apt, "download", "docker-compose"], scratch)
        (package,) = scratch.glob("docker-compose_*.deb")
        _run(["dpkg-deb", "-x", str(package), str(scratch / "out")])
        (scratch / "out").rename(folder)


def _run(command: list[str], folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_LIMIT_S)
    return done.stdout.strip()
