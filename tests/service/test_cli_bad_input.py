"""Bad input on the command line: one clear message that names the setting, exit code 2, and nothing else happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_decant import ForkedDecant

from bench.ports import free_ports
from decant.command_line import run

pytestmark = pytest.mark.sockets


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def port_shared_as_grpc_does() -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def message(capfd: pytest.CaptureFixture[str]) -> Message:
    return Message(capfd)


class Message:
    """Runs `decant` in this process; the one line it leaves on stderr."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str, exit_code: int = 2, environment: dict[str, str] | None = None) -> str:
        assert run(arguments, environment or {}) == exit_code
        out, err = self._capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err.strip()


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "router", "doctor"])
def test_an_unknown_option_is_named_with_the_nearest(command: str, message: Message) -> None:
    assert message(command, "--modell=x") == f"decant {command}: --modell: unknown option; did you mean --model?"


def test_an_unknown_variable_is_named(message: Message) -> None:
    found = message("up", environment={"DECANT_BLOCKSIZE": "8"})
    assert found == "decant up: DECANT_BLOCKSIZE: unknown environment variable; did you mean DECANT_BLOCK_SIZE?"


def test_an_unknown_command_is_named_with_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["decod"], {}) == 2
    assert capfd.readouterr().err.startswith("decant: unknown command 'decod'; did you mean decode?\n")


def test_a_port_in_use_is_named_by_its_option(taken_port: int, message: Message) -> None:
    found = message("up", f"--http-port={taken_port}")
    assert found == f"decant up: --http-port: 127.0.0.1:{taken_port} is in use by another process"


def test_a_port_that_another_grpc_server_would_share_counts_as_in_use(
    port_shared_as_grpc_does: int, message: Message
) -> None:
    found = message("decode", "--model=x", f"--control-port={port_shared_as_grpc_does}")
    assert found.startswith("decant decode: --control-port: ")


def test_a_port_of_the_nodes_cannot_be_the_routers(message: Message) -> None:
    assert message("up", "--http-port=27102", "--node-index=2000").startswith(
        "decant up: --http-port: 27102 is a port of"
    )


def test_an_address_that_is_not_ours_is_named(message: Message) -> None:
    found = message("router", "--model=x", "--key-file=k", "--host=192.0.2.1")
    assert found == "decant router: --host: 192.0.2.1 is no address of this machine"


def test_a_wildcard_host_needs_an_address_that_others_can_dial(message: Message) -> None:
    found = message("decode", "--model=x", "--host=0.0.0.0")
    assert found.startswith("decant decode: --advertise-address: is required when --host is 0.0.0.0")


def test_a_missing_model_folder_is_named(message: Message) -> None:
    assert message("up", "--model=/no/such/folder", *moved_ports()) == (
        "decant up: --model: there is no folder /no/such/folder"
    )


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "must hold a JSON object")]
)
def test_a_broken_model_folder_is_named(tmp_path: Path, content: str | None, problem: str, message: Message) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    found = message("up", f"--model={tmp_path}", *moved_ports())
    assert found.startswith("decant up: --model: ")
    assert problem in found


def test_weights_that_are_no_weights_are_one_message_and_exit_code_2(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"vocab_size": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors at all")
    arguments, log = ["decode", f"--model={tmp_path}", "--node-index=2103"], tmp_path / "log"
    assert ForkedDecant(arguments, os.environ, log).wait(100) == 2
    (line,) = log.read_text().splitlines()
    assert line.startswith(f"decant decode: --model: {tmp_path / 'model.safetensors'} is no whole safetensors file")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("--block-size=-1", "must be at least 1, not -1"),
        ("--block-size=sixteen", "'sixteen' is not a whole number"),
        ("--silence-limit-s=nan", "must be finite, not nan"),
        ("--dtype=int8", "'int8' is not one of auto, float32, bfloat16, float16"),
        ("--data-port=70000", "must be at most 65535, not 70000"),
        ("--registry=somewhere", "must be redis://host:port or host:port"),
    ],
)
def test_a_value_that_is_wrong_is_named_with_what_would_be_right(setting: str, problem: str, message: Message) -> None:
    found = message("decode", "--model=x", setting)
    assert found.startswith(f"decant decode: {setting.partition('=')[0]}: ")
    assert problem in found


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path, message: Message) -> None:
    found = message("prefill", "--model=x", f"--key-file={tmp_path / 'none'}", "--node-index=2103")
    assert found == f"decant prefill: --key-file: {tmp_path / 'none'} cannot be read: FileNotFoundError"


def test_a_staging_memory_of_less_than_two_slots_is_refused(message: Message) -> None:
    assert "--staging-bytes: must hold at least two slots" in message("up", "--staging-bytes=1MiB", "--slot-bytes=1MiB")


def test_a_step_that_cannot_hold_the_batch_is_refused(message: Message) -> None:
    assert "--max-num-batched-tokens: is 8, less than --max-num-seqs (64)" in message(
        "up", "--max-num-batched-tokens=8"
    )


def test_print_config_shows_values_with_their_origins(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"DECANT_SLOT_BYTES": "2MiB"}
    assert run(["decode", "--model=m", "--block-size=32", "--print-config"], environment) == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["--block-size"] == ["32", "command line"]
    assert lines["--slot-bytes"] == ["2097152", "environment DECANT_SLOT_BYTES"]
    assert lines["--control-port"] == ["7100", "default"]


def test_the_command_line_of_a_router_imports_no_torch() -> None:
    script = (
        "import sys; from decant.command_line import run\n"
        "assert run(['router', '--model=m', '--key-file=k', '--print-config'], {}) == 0\n"
        "import router.main\n"
        "heavy = {'torch', 'libucx', 'engine', 'kv_transfer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def moved_ports() -> tuple[str, ...]:
    """Options that move every port of `decant up` to free ones, so that only the tested setting is wrong."""
    http, grpc = free_ports(2)
    return f"--http-port={http}", f"--grpc-port={grpc}", "--node-index=2101"
