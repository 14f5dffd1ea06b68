"""Certificates for tests: an authority, and sets of files that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

SERVER_NAME = "decant.internal"
"""The name that every certificate carries beside 127.0.0.1."""


@dataclass(frozen=True)
class Files:
    """Paths of one process's certificate, its key, and the authority that it trusts."""

    certificate: Path
    private_key: Path
    authority: Path

    def tls_options(self) -> dict[str, object]:
        """As keyword options of a router or node."""
        return {
            "tls_cert_file": str(self.certificate),
            "tls_key_file": str(self.private_key),
            "tls_ca_file": str(self.authority),
        }

    def arguments(self, prefix: str = "tls") -> list[str]:
        return [
            f"--{prefix}-cert-file={self.certificate}",
            f"--{prefix}-key-file={self.private_key}",
            f"--{prefix}-ca-file={self.authority}",
        ]


class Authority:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *identities: str, not_after: datetime | None = None) -> Files:
        """Also over files that exist: a renewal."""
        made = self._ca.issue_cert(*(identities or ("127.0.0.1", SERVER_NAME)), not_after=not_after)
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key", self.file)
        for path in (files.certificate, files.private_key):
            path.unlink(missing_ok=True)
        files.private_key.touch(mode=0o600)
        made.private_key_pem.write_to_path(files.private_key)
        for index, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(files.certificate, append=index > 0)
        return files
