"""One sequence on its way through the engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stenograph.memory.page_allocator import PageId
from stenograph.sampling.params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: `token_ids` is prompt then output, `num_computed` says how many of them have their KV in pages.

    The scheduler alone changes `status`, `slot`, `pages` and `num_computed`; the engine core alone appends tokens.
    While decoding, `num_computed == len(token_ids) - 1`: the last sampled token is the next step's input.
    """

    request_id: str
    prompt_len: int
    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_total: int  # prompt + max_tokens
    priority: int = 0
    arrival: int = 0  # order of admission, for first come, first served
    status: Status = Status.WAITING
    slot: int = -1  # row in the executor's per-request state, while running
    num_computed: int = 0
    pages: list[PageId] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """`count` tokens of one request, token_ids[start : start + count]; `samples` where they reach its last token."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.request.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """The rows of one step: single-token (decode) rows first, then prefill chunks."""

    rows: tuple[ScheduledRow, ...]
    num_decode: int

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)
