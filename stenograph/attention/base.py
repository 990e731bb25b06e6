"""The contract between layers, attention backends and whoever runs a step.

Shapes: T tokens of the step, R requests (rows) of the step, W pages in a row of the page table, H query heads,
G KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one attention layer asks of the backend."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees this many positions, its own included
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTables:
    """What kernels read of one step, on the device. Lengths come from these tensors alone, so that a recorded step
    may be replayed with others; the numbers here are fixed when a step is recorded.

    A row whose kv_len is 0 is padding: nothing of it is read, its output is zeros.
    """

    max_query_len: int  # no row has more tokens in this step; 1: decode alone
    query_starts_R1: Tensor  # int32 [R + 1], the rows' first tokens; the last is T
    kv_lens_R: Tensor  # int32 [R], tokens in the cache once this step's are written
    page_table_RW: Tensor  # int32 [R, W]
    token_slots_T: Tensor  # int64 [T], where each token's key and value go

    @property
    def num_rows(self) -> int:
        return self.kv_lens_R.shape[0]

    def rows(self, start: int, stop: int, *, max_query_len: int) -> BatchTables:
        """Some of the rows. `query_starts_R1` still counts from the step's first token, and `token_slots_T` stays
        whole."""
        return BatchTables(
            max_query_len=max_query_len,
            query_starts_R1=self.query_starts_R1[start : stop + 1],
            kv_lens_R=self.kv_lens_R[start:stop],
            page_table_RW=self.page_table_RW[start:stop],
            token_slots_T=self.token_slots_T,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the tokens of one step are, as the host knows it. Rows with one token come first; tokens of a row are
    consecutive. `tables` says the same on the device: torch_native does without."""

    num_decode: int  # rows with a single token
    query_lens: list[int]  # [R] tokens of each row in this step
    kv_lens: list[int]  # [R] tokens of each row in the cache once this step's are written
    page_tables: list[list[int]]  # [R] page ids, enough for kv_lens
    token_slots_T: Tensor  # int64 [T] where each token's key and value go
    tables: BatchTables | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest step that will ever come: what workspaces and metadata are sized by."""

    max_rows: int
    max_tokens: int
    max_context: int  # tokens of one row


class AttentionPlan(Protocol):
    """One step's attention, the same for all layers."""

    def attend(self, spec: AttentionSpec, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Writes k and v to the cache, then returns each query's causal attention over its row, [T, H, D]."""
        ...


class AttentionBackend(Protocol):
    """Owns its metadata and workspaces, allocated once by `allocate`, never in a step.

    A step that isn't recorded: `plan`, then the forward pass. A recorded one: `bind` before it is recorded, `refresh`
    before each replay.
    """

    name: str

    def allocate(self, limits: Limits) -> None:
        """Workspaces for the largest step. They never grow afterwards: a step beyond the limits is an error."""
        ...

    def plan(self, layout: BatchLayout) -> AttentionPlan: ...

    def bind(self, tables: BatchTables) -> AttentionPlan:
        """A plan for steps of just this shape that reads lengths, pages and slots from `tables` whenever it runs, and
        depends on nothing else: no length may become a Python number."""
        ...

    def refresh(self, tables: BatchTables, kv_lens: list[int]) -> None:
        """Host-side work before a replay of what was bound to `tables`: most need none."""
        ...
