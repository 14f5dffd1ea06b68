"""`decant new-key FILE`: draws a master key into a file that only its owner may read. A key that is there stays as it is, so that
the command may stand before every start.

Must not know: who uses the key.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundation.errors import ConfigurationError
from foundation.keys import draw_master_keys, read_key_file, write_key_file

USAGE = "usage: decant new-key FILE\n"


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Raises ConfigurationError when the file cannot be written, or holds something else."""
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigurationError("FILE", f"one file is wanted, not {' '.join(arguments) or 'nothing'}; {USAGE.strip()}")
    path = Path(arguments[0]).expanduser()
    try:
        write_key_file(path, draw_master_keys())
    except FileExistsError:
        read_key_file(path)
        sys.stdout.write(f"{path} is there already\n")
    except OSError as error:
        raise ConfigurationError("FILE", f"{path} cannot be written: {error.strerror}") from None
    else:
        sys.stdout.write(f"{path} written\n")
    return 0
