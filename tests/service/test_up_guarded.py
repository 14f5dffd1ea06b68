"""`decant up` with API keys and a certificate: it starts, lets in who shows a key, and tells no key to other processes."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import Authority
from decant_up import LIMIT_S, Up

from decant.client import ApiError, Client, Tls
from foundation.api_keys import Scope, add_api_key

pytestmark = pytest.mark.sockets


@dataclass
class Guarded:
    up: Up
    key: str
    authority: Path

    def ask(self, key: str | None) -> tuple[int, dict[str, object]]:
        body = json.dumps({"model": "toy", "prompt": "hello", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        request = urllib.request.Request(f"https://127.0.0.1:{self.up.http_port}/v1/completions", body, headers)
        trust = ssl.create_default_context(cafile=str(self.authority))
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S, context=trust) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("up-guarded")
    authority = Authority(folder / "front")
    files, key = authority.issue("router"), add_api_key(folder / "api-keys", "team", Scope.INFERENCE)
    up = Up(
        folder,
        "--model=toy",
        "--kv-cache-memory-bytes=8MiB",
        "--staging-bytes=16MiB",
        f"--ssl-certfile={files.certificate}",
        f"--ssl-keyfile={files.private_key}",
        f"--api-key-file={folder / 'api-keys'}",
    )
    try:
        up.await_ready()
        yield Guarded(up, key, authority.file)
    finally:
        up.process.kill()
        up.process.wait()


def test_it_serves_over_tls_whoever_shows_a_key(guarded: Guarded) -> None:
    assert guarded.ask(None)[0] == 401
    assert guarded.ask("decant-something-else")[0] == 401
    status, answer = guarded.ask(guarded.key)
    assert status == 200, answer
    line = re.search(r"curl .*https://\S+ .*Authorization: Bearer \$DECANT_API_KEY", guarded.up.output)
    assert line is not None, guarded.up.output
    address, tls = f"127.0.0.1:{guarded.up.grpc_port}", Tls(ca_file=guarded.authority)
    with Client(address, api_key=guarded.key, tls=tls) as client:
        assert client.complete("hello", max_tokens=4).token_ids
    with Client(address, tls=tls) as client, pytest.raises(ApiError, match="API key is required"):
        client.complete("hello", max_tokens=4)


def test_the_key_that_its_nodes_show_stands_in_no_command_line(guarded: Guarded) -> None:
    children = guarded.up.children()
    assert set(children) == {"router", "prefill", "decode"}
    environment = Path(f"/proc/{children['decode']}/environ").read_text()
    drawn = re.search(r"DECANT_API_KEY=([^\0]+)", environment)
    assert drawn is not None
    for pid in children.values():
        assert drawn[1] not in Path(f"/proc/{pid}/cmdline").read_text()
    assert drawn[1] not in guarded.up.output + (guarded.up.folder / "log").read_text()
