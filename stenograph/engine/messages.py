"""What the front end and the engine process say to each other: msgpack over two ipc sockets, one each way.

Data only, never pickle: a request's text and numbers are decoded into these types or refused.
"""

from __future__ import annotations

import msgspec

from stenograph.engine.types import EngineOutput, EngineRequest, EngineStats


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Sequences to generate. Those that can never run come back as `Refused`."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Sequences that nobody waits for any more. No output follows for them."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Leave, whatever is running."""


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The model is loaded; the limits that requests are checked against."""

    vocab_size: int
    context_length: int
    max_request_tokens: int
    stats: EngineStats


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start, or has to stop: the error's message, for the user."""

    message: str


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """All that one step produced, and the state after it."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A request that can never run: the fields of `RequestError`."""

    request_id: str
    message: str
    param: str | None
    code: str | None
    status: int


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Sent every second, also while loading and inside a long step. `busy_seconds`: since when the same step runs."""

    busy_seconds: float


ToEngine = Add | Abort | Stop
FromEngine = Ready | Failed | Outputs | Refused | Beat
