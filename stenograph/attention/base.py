"""The contract between the executor, the models and an attention backend.

Shapes: T tokens of the step, R requests (rows) of the step, M pages of the longest row, H query heads, G KV heads,
D head_dim.
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
class BatchLayout:
    """Where the tokens of one step are. Rows with one token come first; tokens of a row are consecutive."""

    num_decode: int  # rows with a single token
    query_lens: list[int]  # [R] tokens of each row in this step
    kv_lens: list[int]  # [R] tokens of each row in the cache once this step's are written
    page_tables: list[list[int]]  # [R] page ids, enough for kv_lens
    token_slots_T: Tensor  # int64 [T] where each token's key and value go


class AttentionPlan(Protocol):
    """One step's attention, the same for all layers."""

    def attend(self, spec: AttentionSpec, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Writes k and v to the cache, then returns each query's causal attention over its row, [T, H, D]."""
        ...


class AttentionBackend(Protocol):
    """Owns its metadata and workspaces; `plan` is called once a step, before the forward pass."""

    name: str

    def plan(self, layout: BatchLayout) -> AttentionPlan: ...
