"""What stands in files, read again when one of them has changed: certificates and API keys are renewed while a process serves.

What is read must fit together. A set that does not, as in the middle of a renewal, leaves the last good one in use and is
logged once. Looking costs one `stat` for each file; any thread may look.

Must not know: what stands in the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from foundation.errors import ConfigurationError
from foundation.log import get_logger

log = get_logger()

Content = TypeVar("Content")
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[Content]):
    def __init__(self, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        """Reads once. Raises what `read` raises: ConfigurationError."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = Lock()
        self._stamp = self._look()  # before reading: what changes meanwhile is read again
        self._content = read()

    def current(self) -> Content:
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._content = self._read()
                except ConfigurationError as error:
                    log.error("changed file not taken", setting=error.setting, problem=error.problem)
                else:
                    log.info("read again", files=[str(path) for path in self._paths])
            return self._content

    def _look(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
