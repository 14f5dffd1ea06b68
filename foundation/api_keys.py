"""API keys: who may ask a router. Drawn here, shown once, kept as salted digests only.

A key is 256 random bits, so that one fast hash protects it at rest: there is nothing to guess, and a slow hash on every request
would be a way to exhaust the router. `find` hashes what was presented with every key's salt, whichever fits, and compares in
constant time. A key file is text, one key a line, readable by its owner (and group) only:

    <name> <scope> <salt, base64> <digest, base64>

Scopes: `inference` may ask for answers, `node` may announce a node to the embedded registry, `admin` may do both, look at
requests of others, and withhold nodes.

Must not know: HTTP, gRPC. Never logged: keys; their names are.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from pathlib import Path

from foundation.errors import ConfigurationError
from foundation.reloaded import Reloaded

SETTING = "--api-key-file"
VARIABLE = "DECANT_API_KEY"
"""One key in the environment: a router's only admin key beside the file's, and what our own clients present."""
PREFIX = "decant-"
KEY_BYTES = 32
SHORTEST_KEY = 16
LONGEST_KEY = 512
"""Characters; what is longer is not hashed at all."""
MOST_KEYS = 1000
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ENVIRONMENT_NAME = "environment"


class Scope(Enum):
    INFERENCE = "inference"
    NODE = "node"
    ADMIN = "admin"

    def covers(self, needed: Scope) -> bool:
        return self is Scope.ADMIN or self is needed


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is kept."""

    name: str
    scope: Scope
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys that are good now."""

    keys: tuple[ApiKey, ...]

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, if it is one. Every key is tried, so that the time taken tells nothing."""
        if len(presented) > LONGEST_KEY:
            return None
        found = None
        for key in self.keys:
            if hmac.compare_digest(_digest(presented, key.salt), key.digest):
                found = key
        return found


class ApiKeyStore:
    """The keys of a router: its file's, as it stands now, and the one in the environment."""

    def __init__(self, path: Path | None, presented: str | None = None) -> None:
        """Raises ConfigurationError."""
        self._file = None if path is None else Reloaded([path], lambda: read_api_keys(path))
        if presented is not None and not SHORTEST_KEY <= len(presented) <= LONGEST_KEY:
            raise ConfigurationError(VARIABLE, f"must have {SHORTEST_KEY} to {LONGEST_KEY} characters")
        self._fixed = () if presented is None else (_kept(_ENVIRONMENT_NAME, Scope.ADMIN, presented),)

    @property
    def required(self) -> bool:
        """Whether anybody must present a key. An empty file lets nobody in; no file and no variable, everybody."""
        return self._file is not None or bool(self._fixed)

    def find(self, presented: str) -> ApiKey | None:
        of_file = () if self._file is None else self._file.current().keys
        return ApiKeys((*self._fixed, *of_file)).find(presented)


def api_key_of(environment: Mapping[str, str]) -> str | None:
    return environment.get(VARIABLE) or None


def read_api_keys(path: Path) -> ApiKeys:
    """Raises ConfigurationError naming the file and line."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(SETTING, f"{path} cannot be read: {type(error).__name__}") from None
    if mode & 0o007:
        raise ConfigurationError(SETTING, f"{path} is open to everybody (mode {mode:04o}); chmod 600 it")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    keys = tuple(_key_of(path, number, words) for number, words in lines if words and not words[0].startswith("#"))
    names = [key.name for key in keys]
    if len(names) > MOST_KEYS:
        raise ConfigurationError(
            SETTING, f"{path} holds {len(names)} keys; at most {MOST_KEYS}, each of which is tried"
        )
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(SETTING, f"{path} names {repeated} twice")
    return ApiKeys(keys)


def draw_api_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def add_api_key(path: Path, name: str, scope: Scope) -> str:
    """Draw a key, keep its digest under `name`, and return it: it can never be read again. Raises ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError("NAME", f"must be 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r}")
    known = read_api_keys(path).keys if path.exists() else ()
    if any(key.name == name for key in known):
        raise ConfigurationError("NAME", f"{path} has a key named {name} already; remove it first")
    key = draw_api_key()
    _write(path, [*known, _kept(name, scope, key)])
    return key


def remove_api_key(path: Path, name: str) -> None:
    """Raises ConfigurationError when there is none of this name."""
    known = read_api_keys(path).keys
    left = [key for key in known if key.name != name]
    if len(left) == len(known):
        raise ConfigurationError("NAME", f"{path} has no key named {name}")
    _write(path, left)


def _kept(name: str, scope: Scope, key: str) -> ApiKey:
    salt = secrets.token_bytes(_SALT_BYTES)
    return ApiKey(name, scope, salt, _digest(key, salt))


def _digest(key: str, salt: bytes) -> bytes:
    return blake2b(key.encode(errors="surrogateescape"), digest_size=_DIGEST_BYTES, salt=salt).digest()


def _key_of(path: Path, number: int, words: list[str]) -> ApiKey:
    shape = (
        f"{path} line {number} is not `<name> inference|node|admin <salt> <digest>`; decant key add makes such lines"
    )
    try:
        name, scope, salt, digest = words
        key = ApiKey(name, Scope(scope), base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True))
    except (ValueError, binascii.Error):
        raise ConfigurationError(SETTING, shape) from None
    if not _NAME.fullmatch(name) or len(key.salt) != _SALT_BYTES or len(key.digest) != _DIGEST_BYTES:
        raise ConfigurationError(SETTING, shape)
    return key


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Whole or not at all: a router may be reading it. The mode of a file that exists is kept."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    lines = [
        f"{key.name} {key.scope.value} {base64.b64encode(key.salt).decode()} {base64.b64encode(key.digest).decode()}\n"
        for key in keys
    ]
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            file.writelines(lines)
        os.chmod(file.name, mode)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigurationError(SETTING, f"{path} cannot be written: {error.strerror}") from None
