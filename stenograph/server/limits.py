"""What the HTTP server lets one request take, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_request_bytes: int = 8 * 2**20
    max_prompts: int = 1024  # of one completions request
    max_sequences: int = 1024  # prompts * n of one request
    drain_seconds: float = 60.0  # how long running answers may go on after SIGTERM
    linger_seconds: float = 2.0  # how long a server whose engine died goes on telling so before it exits
    retry_after: int = 1  # seconds, told to clients that were turned away
