"""What the executor is asked to do in one step, and what comes back. Plain data, sent as it is to every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from stenograph.sampling.params import TokenLogprob
from stenograph.sampling.sampler import SamplingRow


@dataclass(slots=True, kw_only=True)
class StepRow:
    """`token_ids` of one sequence at positions start .. start + len(token_ids) - 1, its KV in `pages`.

    `sampling` is set where a token is to be chosen after the last of them. `prompt_logprobs` asks for the
    log-probability (and so many alternatives) of each token that follows one of `token_ids`: `next_token_ids`, which
    may be one shorter than `token_ids`.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    sampling: SamplingRow | None
    prompt_logprobs: int | None = None
    next_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Step:
    """Rows with a single token first."""

    rows: list[StepRow]
    num_decode: int


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Lists run over the rows that sample, in order; `prompt_logprobs` is keyed by row."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None
    nan_rows: set[int]
    prompt_logprobs: dict[int, list[TokenLogprob]]
