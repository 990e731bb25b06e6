"""Every error that a user of Stenograph can cause, each with a remedy.

The command line prints `str(error)` on one line and exits with 2; the HTTP server turns a `RequestError` into an
OpenAI-shaped body with its `status`. Anything else that escapes is a defect of ours.
"""

from __future__ import annotations


class StenographError(Exception):
    """Base class. `message` says what is wrong, `remedy` what to do about it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message.rstrip('.')}. {remedy}")
        self.message = message
        self.remedy = remedy


class ConfigError(StenographError, ValueError):
    """A setting that is unknown, unreadable, out of range, or in conflict with another one."""


class ModelLoadError(StenographError):
    """A checkpoint, tokenizer or chat template that is missing, damaged or not supported."""


class OutOfMemoryError(StenographError):
    """Not enough memory for the weights or for one page of KV cache; the message says how much is missing."""


class EngineDeadError(StenographError):
    """The engine process is gone; the request that was running got no answer."""


class RequestError(StenographError, ValueError):
    """A request that cannot be served as it is.

    `param` is the field at fault (OpenAI's `error.param`), `code` OpenAI's `error.code`, `status` the HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param
        self.code = code
        self.status = status
