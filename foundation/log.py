"""Logs: structlog, JSON lines on stderr (coloured text where stderr is a terminal), each with what it is about.

A process's `main` calls `configure` once; modules take `log = get_logger()` and write events as facts with fields:
`log.info("transfer committed", bytes=n)`. `bound(request=..., attempt=...)` adds fields to every line written in its block,
also by other modules, also in tasks started there.

Never logged: prompts, answers, keys.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import structlog

from foundation.ids import AttemptId, Incarnation, NodeId, TransferId


def configure(
    level: str,
    log_format: str,
    *,
    role: str,
    node: NodeId | None = None,
    incarnation: Incarnation | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set up logging of this process. `log_format` is auto, json or console; `stream` is stderr unless told otherwise.

    `role`, `node` and `incarnation` stand in every line, whatever thread writes it.
    """
    target = stream or sys.stderr
    as_text = log_format == "console" or (log_format == "auto" and target.isatty())
    least = logging.getLevelNamesMapping()[level.upper()]
    identity: dict[str, Any] = {"role": role}
    if node is not None:
        identity["node"] = node
    if incarnation is not None:
        identity["incarnation"] = f"{incarnation:016x}"

    def add_identity(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**identity, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_identity,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.typing.Processor] = (
        [
            _without_control_characters,
            # Plain: the richer form shows local variables, prompts and keys among them.
            structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(file=target),
    )
    _adopt_standard_logging(target, max(least, logging.WARNING), [*shared], rendering)


def _without_control_characters(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """On a terminal what a stranger said must neither end a line nor move the cursor. (JSON escapes both by itself.)"""
    return {
        key: _escaped(value) if isinstance(value, str) and key != "exception" else value for key, value in event.items()
    }


def _escaped(text: str) -> str:
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def get_logger() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


@contextmanager
def bound(about: AttemptId | TransferId | None = None, **fields: Any) -> Iterator[None]:
    """Add fields to every line written inside; `about` adds request and attempt (and try)."""
    with structlog.contextvars.bound_contextvars(**naming(about), **fields):
        yield


def bind(**fields: Any) -> None:
    """Add fields to every line that the present task, and tasks that it starts, write from now on."""
    structlog.contextvars.bind_contextvars(**fields)


def naming(about: AttemptId | TransferId | None) -> dict[str, Any]:
    """The fields by which a request's lines are found."""
    match about:
        case None:
            return {}
        case TransferId(request, attempt, try_number):
            return {"request": request, "attempt": attempt, "try_number": try_number}
        case AttemptId(request, attempt):
            return {"request": request, "attempt": attempt}


def _adopt_standard_logging(
    target: TextIO, level: int, shared: list[structlog.typing.Processor], rendering: list[structlog.typing.Processor]
) -> None:
    """Lines of libraries that use `logging`, in the same form."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
