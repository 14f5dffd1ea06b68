"""Whether one may listen where the options say, asked before anything slow is started.

gRPC listens with SO_REUSEPORT, so that a second process on the same port would silently take half of the connections: the
port has to be asked for without it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from foundation.errors import ConfigurationError

CONNECT_LIMIT_S = 1.0


def is_only_of_this_machine(host: str) -> bool:
    """Whether only processes of this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_free_port(setting: str, host: str, port: int, *, may_linger: bool = False) -> None:
    """Raises ConfigurationError naming `setting` (or --host) when nothing can listen on host:port now.

    `may_linger`: a port that only connections of a dead process still hold is good enough.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError("--host", f"{host!r} cannot be resolved: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if may_linger and error.errno == errno.EADDRINUSE and not _somebody_listens(host, port):
                return
            raise _refusal(setting, host, port, error) from None


def require_dialable(setting: str, address: str, registry: str) -> None:
    """Raises ConfigurationError naming `setting` when others cannot dial `address`: it is no name at all, or it is loopback
    although the registry is on another machine. A registry that cannot be resolved yet says nothing; it may start later."""
    try:
        own = _resolved(address)
    except socket.gaierror as error:
        raise ConfigurationError(setting, f"{address!r} cannot be resolved: {error.strerror}") from None
    try:
        others = _resolved(_host_of(registry))
    except socket.gaierror:
        return
    if all(one.is_loopback for one in own) and not any(one.is_loopback for one in others):
        raise ConfigurationError(
            setting,
            f"{address} is loopback, but the registry {_host_of(registry)} is not: others would dial themselves",
        )


def _host_of(registry: str) -> str:
    """Of redis://user:password@host:port/0, unix:///path (which is here), or host:port."""
    if "://" in registry:
        return urlsplit(registry).hostname or "localhost"
    return registry.rpartition(":")[0].strip("[]")


def _resolved(host: str) -> list[IPv4Address | IPv6Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def lingers(port: int) -> bool:
    """Whether a listener without SO_REUSEADDR is refused this port on some address of this machine.

    Connections of a process that was killed hold its port for up to a minute, until the other ends have closed theirs too.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _somebody_listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def _refusal(setting: str, host: str, port: int, error: OSError) -> ConfigurationError:
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigurationError(setting, f"{host}:{port} is in use by another process")
        case errno.EADDRNOTAVAIL:
            return ConfigurationError("--host", f"{host} is no address of this machine")
        case errno.EACCES:
            return ConfigurationError(setting, f"{host}:{port} needs root; ports from 1024 do not")
        case code:
            return ConfigurationError(setting, f"cannot listen on {host}:{port}: {os.strerror(code or 0)}")
