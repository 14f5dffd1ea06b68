"""Keys under which routers sign tickets and prefill nodes check them.

Routers hold master keys; a prefill node needs only its own node key, HMAC-SHA256(master, node id), so that a stolen node
cannot speak for a router to another node. At most two keys are live at once: the first signs, both are accepted, which is
how one rotates without a refused request.

A key file is text, one key a line, readable by its owner only; one of root's also by a group, which is how Kubernetes hands
a secret to a process that is not root (PostgreSQL's rule for private keys):

    master <kid> <base64 of 32 bytes>
    node <kid> <base64 of 32 bytes>

Must not know: what is signed. Never logged: no `repr` here shows key bytes.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import ConfigurationError
from foundation.ids import NodeId

KEY_BYTES = 32
LIVE_KEYS = 2
LARGEST_KID = 0xFFFF
SETTING = "--key-file"


@dataclass(frozen=True, slots=True)
class NodeKey:
    """One prefill node's key. `kid` names the master key it was derived from."""

    kid: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The live keys of one prefill node; the first one signs."""

    keys: tuple[NodeKey, ...]

    def signing(self) -> NodeKey:
        return self.keys[0]

    def find(self, kid: int) -> NodeKey | None:
        return next((key for key in self.keys if key.kid == kid), None)


@dataclass(frozen=True, slots=True)
class MasterKeys:
    """The live (kid, secret) pairs; what a router holds."""

    secrets: tuple[tuple[int, bytes], ...] = field(repr=False)

    def for_node(self, node_id: NodeId) -> NodeKeys:
        return NodeKeys(
            tuple(NodeKey(kid, hmac.digest(secret, node_id.encode(), "sha256")) for kid, secret in self.secrets)
        )


def draw_master_keys() -> MasterKeys:
    return MasterKeys(((secrets.randbelow(LARGEST_KID) + 1, secrets.token_bytes(KEY_BYTES)),))


def write_key_file(path: Path, keys: MasterKeys | NodeKeys) -> None:
    """Create `path` with mode 0600. Raises FileExistsError rather than replace a key that others hold."""
    if isinstance(keys, MasterKeys):
        lines = [f"master {kid} {base64.b64encode(secret).decode()}\n" for kid, secret in keys.secrets]
    else:
        lines = [f"node {key.kid} {base64.b64encode(key.secret).decode()}\n" for key in keys.keys]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(lines)


def read_key_file(path: Path) -> MasterKeys | NodeKeys:
    """The keys in `path`. Raises ConfigurationError naming the file and line, never a key."""
    try:
        facts = path.stat()
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(SETTING, f"{path} cannot be read: {type(error).__name__}") from None
    mode = stat.S_IMODE(facts.st_mode)
    if is_open_to_others(mode, facts.st_uid, os.geteuid()):
        raise ConfigurationError(SETTING, f"{path} is open to others (mode {mode:04o}); chmod 600 it")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    found = [_key_line(path, number, words) for number, words in lines if words and not words[0].startswith("#")]
    kinds = {kind for kind, _, _ in found}
    if not 1 <= len(found) <= LIVE_KEYS or len(kinds) != 1 or len({kid for _, kid, _ in found}) != len(found):
        raise ConfigurationError(
            SETTING, f"{path} must hold one or two keys, all master or all node, under different kids"
        )
    if kinds == {"master"}:
        return MasterKeys(tuple((kid, secret) for _, kid, secret in found))
    return NodeKeys(tuple(NodeKey(kid, secret) for _, kid, secret in found))


def is_open_to_others(mode: int, owner: int, user: int) -> bool:
    """Whether more may read the file than should: a group may where the file is root's and `user` is not."""
    return bool(mode & (0o037 if owner == 0 != user else 0o077))


def _key_line(path: Path, number: int, words: list[str]) -> tuple[str, int, bytes]:
    shape = f"{path} line {number} is not `master|node <kid> <base64 of {KEY_BYTES} bytes>`"
    if len(words) != 3 or words[0] not in ("master", "node"):
        raise ConfigurationError(SETTING, shape)
    try:
        kid, secret = int(words[1]), base64.b64decode(words[2], validate=True)
    except (ValueError, binascii.Error):
        raise ConfigurationError(SETTING, shape) from None
    if not 0 <= kid <= LARGEST_KID or len(secret) != KEY_BYTES:
        raise ConfigurationError(SETTING, shape)
    return words[0], kid, secret
