"""Logs: one JSON object a line, with what it is about; no local variables in tracebacks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from foundation.ids import AttemptId, Incarnation, NodeId, RequestId
from foundation.log import bound, configure, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    target = io.StringIO()
    configure("info", "json", role="decode", node=NodeId("d0"), incarnation=Incarnation(77), stream=target)
    yield target
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_names_node_incarnation_request_and_attempt(stream: io.StringIO) -> None:
    with bound(AttemptId(RequestId("r"), 2), peer="p0"):
        get_logger().info("a fact", size_bytes=3)
    get_logger().info("another")
    first, second = lines(stream)
    assert first | {"timestamp": ""} == {
        "event": "a fact",
        "level": "info",
        "timestamp": "",
        "role": "decode",
        "node": "d0",
        "incarnation": "000000000000004d",
        "request": "r",
        "attempt": 2,
        "peer": "p0",
        "size_bytes": 3,
    }
    assert "request" not in second


def test_lines_of_libraries_come_in_the_same_form(stream: io.StringIO) -> None:
    logging.getLogger("some.library").warning("it says %s", "so")
    assert lines(stream)[0]["event"] == "it says so"
    assert lines(stream)[0]["node"] == "d0"


def test_a_traceback_shows_no_local_variables(stream: io.StringIO) -> None:
    prompt = "a secret " + "prompt"
    configure("info", "console", role="decode", stream=stream)
    try:
        raise ValueError(len(prompt))
    except ValueError:
        get_logger().exception("it failed")
    assert "ValueError" in stream.getvalue()
    assert "a secret prompt" not in stream.getvalue()


def test_less_than_the_least_level_is_not_written(stream: io.StringIO) -> None:
    get_logger().debug("noise")
    assert stream.getvalue() == ""


def test_on_a_terminal_what_a_stranger_said_can_neither_end_a_line_nor_move_the_cursor() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    target = io.StringIO()
    configure("info", "console", role="router", stream=target)
    try:
        get_logger().info("refused", path="/x\n2026 fake line \x1b[2J\x9b31m\u202e", peer="d\r0")
    finally:
        structlog.reset_defaults()
        root.handlers, root.level = handlers, level
    text = target.getvalue()
    assert text.count("\n") == 1
    assert not any(character in text for character in "\r\x1b\x9b\u202e")
    assert "2026 fake line" in text
