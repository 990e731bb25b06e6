"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with the right status,
and nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from stenograph.errors import EngineDeadError, RequestError, StenographError

LONGEST_MESSAGE = 1000

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Unavailable(StenographError):
    """The server can't take the request now; a later try may succeed."""

    def __init__(self, message: str, *, status: int, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


class GenerationError(StenographError):
    """The engine gave up on one request."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    if len(message) > LONGEST_MESSAGE:  # a client's own long value, quoted back
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException) -> tuple[dict[str, Any], int, dict[str, str]]:
    """(body, status, headers) of any error. What isn't meant for a user is told as "internal error" alone."""
    if isinstance(error, RequestError):
        return error_body(str(error), status=error.status, param=error.param, code=error.code), error.status, {}
    if isinstance(error, Unavailable):
        headers = {"retry-after": str(error.retry_after)}
        return error_body(str(error), status=error.status, code=error.code), error.status, headers
    if isinstance(error, EngineDeadError):
        return error_body(str(error), status=503, code="engine_dead"), 503, {}
    if isinstance(error, GenerationError):
        return error_body(str(error), status=500, code="generation_failed"), 500, {}
    if isinstance(error, HTTPException):
        message = {404: "There is no such route.", 405: "This route doesn't take that method."}.get(
            error.status_code, str(error.detail)
        )
        return error_body(message, status=error.status_code), error.status_code, dict(error.headers or {})
    return error_body("Internal error; the server's log has the details.", status=500, code="internal_error"), 500, {}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    body, status, headers = describe(error)
    return json_response(body, status, headers)


def install_error_handlers(app: FastAPI) -> None:
    async def handle(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def hang_up(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    for kind in (StenographError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, hang_up)
