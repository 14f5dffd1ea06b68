"""Refusals as OpenAI clients know them: a status and {"error": {"message", "type", "param", "code"}}.

Decant adds `retryable` wherever the server is at fault: whether the same request may succeed later or elsewhere.

Must not know: what a request asks for.
"""

from __future__ import annotations

import json
import math
from typing import Any

from aiohttp import web

from router.generation import Refusal, RefusalKind

STATUS = {
    RefusalKind.INVALID: 400,
    RefusalKind.MODEL_NOT_FOUND: 404,
    RefusalKind.TOO_LARGE: 413,
    RefusalKind.OVERLOADED: 503,
    RefusalKind.UNAVAILABLE: 503,
    RefusalKind.DEADLINE: 504,
    RefusalKind.CANCELLED: 499,
    RefusalKind.INTERNAL: 500,
}


def error_body(refusal: Refusal) -> dict[str, Any]:
    status = STATUS[refusal.kind]
    error: dict[str, Any] = {
        "message": refusal.message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": refusal.parameter,
        "code": refusal.code,
    }
    if status >= 500:
        error["retryable"] = refusal.retryable
    return {"error": error}


def error_response(refusal: Refusal) -> web.Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(refusal.retry_after_s))
    return web.json_response(error_body(refusal), status=STATUS[refusal.kind], headers=headers)


def plain_error_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> web.Response:
    """For what fails before a request has been understood: wrong path, wrong method, broken HTTP."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)


def error_event(refusal: Refusal) -> bytes:
    """One event of a stream whose status has been sent already."""
    return b"data: " + json.dumps(error_body(refusal)).encode() + b"\n\n"
