"""Certificates: what a peer would refuse stops the start, naming the option; what is renewed is taken, what is broken is not."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import Authority, Files

from foundation.errors import ConfigurationError
from foundation.tls import (
    RenewedContext,
    TlsFiles,
    front_files,
    internal_files,
    read_front,
    read_member,
    tls_failure,
)

ADDRESS = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def internal(files: Files) -> TlsFiles:
    found = internal_files(str(files.certificate), str(files.private_key), str(files.authority))
    assert found is not None
    return found


def refusal(files: Files, name: str | None = ADDRESS) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_member(internal(files), name)
    assert "PRIVATE KEY" not in str(caught.value)
    return str(caught.value)


def test_a_set_that_fits_is_read_whole_and_shows_no_key(authority: Authority) -> None:
    files = authority.issue("good")
    found = read_member(internal(files), ADDRESS).current()
    assert found.private_key == files.private_key.read_bytes()
    assert "PRIVATE KEY" not in repr(found)


def test_parts_of_a_set_are_refused_by_the_missing_name(authority: Authority) -> None:
    files = authority.issue("parts")
    assert internal_files(None, None, None) is None
    with pytest.raises(ConfigurationError, match=r"^--tls-ca-file: is required"):
        internal_files(str(files.certificate), str(files.private_key), None)
    with pytest.raises(ConfigurationError, match=r"^--tls-cert-file: is required"):
        internal_files(None, None, str(files.authority))
    with pytest.raises(ConfigurationError, match=r"^--ssl-certfile: is required with --ssl-keyfile"):
        front_files(None, str(files.private_key), None)


def test_what_others_would_refuse_is_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    good, stranger = authority.issue("one"), Authority(tmp_path / "other").issue("two")
    mixed = Files(good.certificate, stranger.private_key, good.authority)
    assert refusal(mixed).startswith("--tls-cert-file: ")
    assert "no pair of certificate and key" in refusal(mixed)
    foreign = Files(stranger.certificate, stranger.private_key, good.authority)
    assert "would be refused by others" in refusal(foreign)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    assert "expired" in refusal(authority.issue("expired", not_after=yesterday))
    assert "10.9.8.7" in refusal(good, "10.9.8.7")


def test_files_that_are_missing_open_or_no_pem_are_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("readable")
    absent = tmp_path / "absent"
    assert refusal(Files(absent, good.private_key, good.authority)).startswith("--tls-cert-file: ")
    assert refusal(Files(good.certificate, absent, good.authority)).startswith("--tls-key-file: ")
    assert refusal(Files(good.certificate, good.private_key, absent)).startswith("--tls-ca-file: ")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no certificate\n")
    assert refusal(Files(good.certificate, good.private_key, nonsense)).startswith("--tls-ca-file: ")
    good.private_key.chmod(0o644)
    assert "open to" in refusal(good)


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(authority: Authority) -> None:
    files = authority.issue("renewed")
    identity = read_member(internal(files), ADDRESS)
    first = identity.current()
    authority.issue("renewed")
    second = identity.current()
    assert second.chain != first.chain
    files.certificate.write_text("half a certif")
    assert identity.current() is second
    files.certificate.unlink()
    assert identity.current() is second
    authority.issue("renewed")
    assert identity.current().chain == files.certificate.read_bytes()


def test_a_front_may_keep_its_key_in_the_certificates_file(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("front")
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(files.certificate.read_bytes() + files.private_key.read_bytes())
    found = front_files(str(both), None, None)
    assert found is not None
    assert read_front(found).current().authority == b""


def test_an_expired_front_is_refused_and_a_good_one_says_when_it_expires(authority: Authority) -> None:
    def front(files: Files) -> TlsFiles:
        found = front_files(str(files.certificate), str(files.private_key), None)
        assert found is not None
        return found

    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    found = read_front(front(authority.issue("three-days", not_after=end))).current()
    assert found.not_after_s == end.timestamp()
    with pytest.raises(ConfigurationError, match=r"--ssl-certfile: .* expired"):
        read_front(front(authority.issue("over", not_after=datetime.now(UTC) - timedelta(days=1))))


def test_failed_handshakes_of_a_front_are_counted_by_name(authority: Authority) -> None:
    files = authority.issue("counted")
    front = front_files(str(files.certificate), str(files.private_key), str(files.authority))
    assert front is not None
    failed: list[str] = []
    server = RenewedContext(front, failed.append)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    to_server.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        server.context.wrap_bio(to_server, to_client, server_side=True).do_handshake()
    assert failed == ["not_tls"]
    stranger = ssl.create_default_context(cafile=str(files.authority))
    assert shake_hands(stranger, server.context) == "no_certificate"
    assert failed == ["not_tls", "no_certificate"]


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> str | None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=ADDRESS),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return tls_failure(str(error))
    return None


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (
            "Ssl handshake failed (TSI_PROTOCOL_FAILURE): CERTIFICATE_VERIFY_FAILED: self signed",
            "untrusted_certificate",
        ),
        ("Ssl handshake failed: WRONG_VERSION_NUMBER: Invalid certificate verification context", "not_tls"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "expired_certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", "refused_by_peer"),
        ("Hostname Verification Check failed.", "wrong_name"),
        ("Hostname mismatch, certificate is not valid for 'x'", "wrong_name"),
        ("DNS resolution failed: hostname x not found", None),
        ("connection refused", None),
        ("", None),
    ],
)
def test_words_of_libraries_have_names(words: str, name: str | None) -> None:
    assert tls_failure(words) == name
