"""What crosses the boundary between a front end (HTTP server, `LLM`) and the engine core. Plain data, no torch.

The HTTP process encodes these with msgspec; the in-process engine passes them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stenograph.sampling.params import SamplingParams, TokenLogprob

__all__ = [
    "CompletionOutput",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate (a request with n > 1 is n of these, ids made unique by the front end)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams  # max_tokens is resolved to a number, n is 1, seed may be None
    priority: int = 0


@dataclass(slots=True, kw_only=True)
class EngineOutput:
    """What one step produced for one request. `finish_reason` is set exactly once, on its last output."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # complete, on the first output alone; [0] is None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop token id or string that matched; None for the model's own EOS
    error: str | None = None
    cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine, for metrics and tests. Counters grow for ever; the rest is as of now."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    page_size: int = 1
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence as text, as the front end sees it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: `outputs` has one entry for each of the n sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = False
    cached_tokens: int = 0
    error: str | None = None
