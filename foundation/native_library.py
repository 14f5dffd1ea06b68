"""C sources of our own, compiled for this machine when they are first needed and kept in the cache folder.

Must not know: what they compute.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from foundation.errors import SetupError

COMPILE_LIMIT_S = 60.0
_HINDRANCES = (OSError, RuntimeError, subprocess.SubprocessError)
"""RuntimeError: this user has no home."""


def native_library(
    source: Path, flags: Sequence[str] = (), libraries: Sequence[str] = (), mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL | None:
    """Compiled and loaded: about a second the first time on a machine. None where there is no C compiler, it fails, or the cache
    folder cannot hold what it makes: it is nowhere, read-only, or nothing in it may be run."""
    try:
        return _loaded(source, (*flags, *libraries), mode)
    except _HINDRANCES:
        return None


class NativeCalls(NamedTuple):
    """One library twice: `slow` for calls that may wait; `quick` for calls of a microsecond, which keep the interpreter, since to
    let it go and get it back is what would cost."""

    slow: ctypes.CDLL
    quick: ctypes.PyDLL


def native_calls(
    source: Path,
    purpose: str,
    flags: Sequence[str] = (),
    libraries: Sequence[str] = ("-lpthread",),
    mode: int = ctypes.DEFAULT_MODE,
) -> NativeCalls:
    """As `native_library`, of what cannot be done without. Raises SetupError, which names the `purpose` and what hinders it."""
    try:
        slow = _loaded(source, (*flags, *libraries), mode)
    except _HINDRANCES as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise SetupError(
            f"{purpose} need a C compiler (cc, gcc or clang; Debian's packages gcc and libc6-dev), and a cache folder from which "
            f"its work may be run (DECANT_CACHE): {' '.join(said.split())}"
        ) from error
    return NativeCalls(slow, ctypes.PyDLL(slow._name, handle=slow._handle))


def _loaded(source: Path, options: tuple[str, ...], mode: int) -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled(_compiler(), source, options)), mode=mode)


def _compiler() -> list[str]:
    """The command, with its own options. Raises FileNotFoundError."""
    if named := os.environ.get("CC", "").split():
        return named
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise FileNotFoundError("there is no compiler")


def _compiled(compiler: list[str], source: Path, options: tuple[str, ...]) -> Path:
    """The library's path. Its name holds everything that decides its content, this machine's processor included."""
    processor = {
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
    }
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_LIMIT_S).stdout
    content = repr((source.read_text(), compiler[1:], options, sorted(processor), version))
    folder = Path(os.environ.get("DECANT_CACHE") or Path.home() / ".cache" / "decant") / "native"
    library = folder / f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [*compiler, "-shared", "-fPIC", "-o", str(made), str(source), *options]
            subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_LIMIT_S)
            made.replace(library)  # whole or not at all, also when several processes start at once
    return library
