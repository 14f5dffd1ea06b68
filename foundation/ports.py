"""Whether one may listen where the options say, asked before anything slow is started.

gRPC listens with SO_REUSEPORT, so that a second process on the same port would silently take half of the connections: the
port has to be asked for without it.
"""

from __future__ import annotations

import errno
import os
import socket

from foundation.errors import ConfigurationError


def require_free_port(setting: str, host: str, port: int) -> None:
    """Raises ConfigurationError naming `setting` (or --host) when nothing can listen on host:port now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError("--host", f"{host!r} cannot be resolved: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _refusal(setting, host, port, error) from None


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
