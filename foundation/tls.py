"""Certificates: read, proved to fit together, and read again when they are renewed.

Two uses. The *internal plane* (nodes, routers, the embedded registry, the control plane of transfers) is mutual: one certificate
authority signs every process, each shows its certificate and asks for the other's (`read_member`). The *front* that clients see
is a server's certificate, with or without a certificate authority of clients (`read_front`).

A set of files is tried before it is used, by a handshake of the process with itself: what a peer would refuse (a key of another
certificate, another authority, an expired date, a missing name or purpose) stops the start, naming the file's option.

Must not know: gRPC, HTTP. Never logged: keys.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import ConfigurationError
from foundation.log import get_logger
from foundation.reloaded import Reloaded

log = get_logger()

HANDSHAKE_ROUNDS = 10
"""A handshake in memory takes three."""


@dataclass(frozen=True, slots=True)
class TlsOptionNames:
    certificate: str
    private_key: str
    authority: str


INTERNAL = TlsOptionNames("--tls-cert-file", "--tls-key-file", "--tls-ca-file")
FRONT = TlsOptionNames("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`authority` is who signs those whom we ask for a certificate; None asks nobody."""

    certificate: Path
    private_key: Path
    authority: Path | None
    names: TlsOptionNames

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.private_key, self.authority) if path is not None)


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM, as the files say it. `authority` is empty where nobody is asked for a certificate."""

    chain: bytes
    private_key: bytes = field(repr=False)
    authority: bytes
    not_after_s: float
    """When the first certificate of the chain expires, in seconds since 1970."""


TlsIdentity = Reloaded[Certificate]


def internal_files(certificate: str | None, private_key: str | None, authority: str | None) -> TlsFiles | None:
    """None when TLS is off. Raises ConfigurationError when only some of the three are given."""
    given = {INTERNAL.certificate: certificate, INTERNAL.private_key: private_key, INTERNAL.authority: authority}
    if not any(given.values()):
        return None
    if missing := [name for name, value in given.items() if not value]:
        raise ConfigurationError(missing[0], f"is required: {', '.join(given)} go together")
    assert certificate is not None
    assert private_key is not None
    assert authority is not None
    return TlsFiles(Path(certificate), Path(private_key), Path(authority), INTERNAL)


def front_files(certificate: str | None, private_key: str | None, authority: str | None) -> TlsFiles | None:
    """None when TLS is off. As in vLLM the key may stand in the certificate's file. Raises ConfigurationError."""
    if certificate is None:
        if stray := FRONT.private_key if private_key else FRONT.authority if authority else None:
            raise ConfigurationError(FRONT.certificate, f"is required with {stray}")
        return None
    return TlsFiles(Path(certificate), Path(private_key or certificate), Path(authority) if authority else None, FRONT)


def read_member(files: TlsFiles, server_name: str | None) -> TlsIdentity:
    """A member of the internal plane. `server_name`: the name or address under which others dial us, if it is known.

    Raises ConfigurationError.
    """
    assert files.authority is not None, "the internal plane is mutual"

    def read() -> Certificate:
        chain, private_key, authority = _read(files)
        return Certificate(chain, private_key, authority, _shake_hands_with_ourselves(files, server_name, mutual=True))

    return Reloaded(files.paths, read)


def read_front(files: TlsFiles) -> TlsIdentity:
    """A server that clients dial. Raises ConfigurationError."""

    def read() -> Certificate:
        chain, private_key, authority = _read(files)
        return Certificate(chain, private_key, authority, _shake_hands_with_ourselves(files, None, mutual=False))

    return Reloaded(files.paths, read)


def server_context(files: TlsFiles, client_certificates: ssl.VerifyMode) -> ssl.SSLContext:
    """For a server of the standard library. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, files)
    if files.authority is not None:
        _load_authority(context, files)
        context.verify_mode = client_certificates
    return context


def load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Also into a context that serves: the next handshake uses it. Raises ConfigurationError."""
    try:
        context.load_cert_chain(files.certificate, files.private_key, password=_no_password)
    except ssl.SSLError as error:
        problem = f"{files.certificate} and {files.private_key} are no pair of certificate and key"
        if error.reason != "KEY_VALUES_MISMATCH":
            problem = f"{files.certificate} and {files.private_key} cannot be read as PEM: {_words(error)}"
        raise ConfigurationError(files.names.certificate, problem) from None
    except _EncryptedKey:
        problem = f"{files.private_key} is encrypted; a process that starts by itself needs it in the clear"
        raise ConfigurationError(files.names.private_key, problem) from None


class _EncryptedKey(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedKey


def _load_authority(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError as error:
        problem = f"{files.authority} holds no certificates in PEM: {_words(error)}"
        raise ConfigurationError(files.names.authority, problem) from None


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """Chain, key, authority."""
    content = {}
    named = {
        files.names.certificate: files.certificate,
        files.names.private_key: files.private_key,
        files.names.authority: files.authority,
    }
    for name, path in named.items():
        try:
            content[name] = b"" if path is None else path.read_bytes()
            open_to_all = name == files.names.private_key and stat.S_IMODE(path.stat().st_mode) & 0o007 if path else 0
        except OSError as error:
            raise ConfigurationError(name, f"{path} cannot be read: {error.strerror}") from None
        if open_to_all:
            raise ConfigurationError(name, f"{path} is open to everybody; chmod 600 it (640 for a group)")
    chain, private_key, authority = content.values()
    return chain, private_key, authority


def _shake_hands_with_ourselves(files: TlsFiles, server_name: str | None, *, mutual: bool) -> float:
    """Both ends of a handshake with the same files, in memory; when the certificate expires, in seconds since 1970.

    Whether clients trust a front is theirs to say: there the certificate itself is the authority. Raises ConfigurationError.
    """
    server = server_context(files, ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if mutual:
        load_chain(client, files)
        _load_authority(client, files)
    else:
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(files.certificate)
    client.check_hostname = server_name is not None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    ends = [dialling, server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        for _ in range(HANDSHAKE_ROUNDS):
            ends = [end for end in ends if not _done(end)]
    except ssl.SSLError as error:
        problem = f"{files.certificate} would be refused by others: {_words(error)} ({_trusted(files, mutual)})"
        raise ConfigurationError(files.names.certificate, problem) from None
    assert not ends, "a handshake in memory ends"
    shown = dialling.getpeercert()
    assert shown, "a certificate that was verified can be read"
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _trusted(files: TlsFiles, mutual: bool) -> str:
    return f"they trust {files.authority}" if mutual else "whomever they trust"


def _done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or "unknown format").lower().replace("_", " ")


# What handshakes fail for.

_FAILURES = (
    ("CERTIFICATE HAS EXPIRED", "expired_certificate"),
    ("CERTIFICATE EXPIRED", "expired_certificate"),
    ("DID NOT RETURN A CERTIFICATE", "no_certificate"),
    ("CERTIFICATE REQUIRED", "no_certificate"),
    ("HOSTNAME VERIFICATION", "wrong_name"),
    ("HOSTNAME MISMATCH", "wrong_name"),
    ("IP ADDRESS MISMATCH", "wrong_name"),
    ("NOT IN PEER CERTIFICATE", "wrong_name"),
    ("VERIFY FAILED", "untrusted_certificate"),
    ("ALERT", "refused_by_peer"),
    ("HTTP REQUEST", "not_tls"),
    ("WRONG VERSION NUMBER", "not_tls"),
    ("HANDSHAKE FAILED", "broken"),
)
TLS_FAILURES = tuple(dict.fromkeys(name for _, name in _FAILURES))


def tls_failure(text: str) -> str | None:
    """The name, one of TLS_FAILURES, of what a library says about a handshake that failed; None when it is about no handshake."""
    words = text.upper().replace("_", " ")
    return next((name for part, name in _FAILURES if part in words), None)


def count_failed_handshakes(context: ssl.SSLContext, failed: Callable[[str], None]) -> None:
    """From now on `failed` is given the name of each handshake that fails on this server's context."""

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                failed(tls_failure(str(error)) or "broken")
                raise

    context.sslobject_class = Counted


class RenewedContext:
    """A front's context for a server of the standard library; `renew` before a handshake takes a certificate that was renewed.

    Another authority of clients is taken at the next start only: a context cannot forget one.
    """

    def __init__(self, files: TlsFiles, failed: Callable[[str], None]) -> None:
        """Raises ConfigurationError."""
        self._files = files
        self._identity = read_front(files)
        self._served = self._identity.current()
        self.context = server_context(files, ssl.CERT_REQUIRED if files.authority else ssl.CERT_NONE)
        count_failed_handshakes(self.context, failed)

    @property
    def identity(self) -> TlsIdentity:
        return self._identity

    def renew(self) -> None:
        if (current := self._identity.current()) is self._served:
            return
        try:
            load_chain(self.context, self._files)
        except ConfigurationError as error:  # changed once more in this moment: the next handshake looks again
            log.error("changed file not taken", setting=error.setting, problem=error.problem)
        else:
            self._served = current
