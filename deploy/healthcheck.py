#!/usr/bin/python3 -ISs
"""`healthcheck http://127.0.0.1:7102/health`: exit code 0 when the answer is 200, else 1; it prints the body, which says why.

For containers, where no curl is. With https:// the certificate is not checked: this asks the process beside it. A router that
asks clients for a certificate is shown one: `healthcheck https://127.0.0.1:8000/health probe.pem probe.key`.
"""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

LIMIT_S = 3.0


def main(url: str, certificate: str | None = None, private_key: str | None = None) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None, f"{url} names no host"
    try:
        if parts.scheme == "https":
            import ssl

            context = ssl._create_unverified_context()
            if certificate is not None:
                context.load_cert_chain(certificate, private_key)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=LIMIT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(body)
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
