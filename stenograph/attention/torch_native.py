"""Attention in plain torch: the reference on every device, and the default on the CPU.

Decode rows are gathered from their pages into one padded batch and go through one scaled_dot_product_attention;
prefill rows, each with its own prefix, go one by one.

Shapes: T tokens, B decode rows, L longest decode row, Q tokens of a prefill row, K keys of it, H query heads,
G KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stenograph.attention.base import AttentionSpec, BatchLayout
from stenograph.memory.kv_cache import KVCache
from stenograph.memory.page_allocator import PADDING_PAGE


class TorchNativeBackend:
    """Any head size, any page size, any dtype; sliding windows and logit soft-caps."""

    name = "torch_native"

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def plan(self, layout: BatchLayout) -> TorchNativePlan:
        return TorchNativePlan(self.cache, layout)


def is_run(pages: list[int]) -> bool:
    """Whether the pages are consecutive, so that a row's keys are a plain slice of the cache."""
    return pages[-1] - pages[0] == len(pages) - 1 and all(b - a == 1 for a, b in zip(pages, pages[1:], strict=False))


class TorchNativePlan:
    """Index tensors of one step, shared by all layers. Masks are made once for each window size."""

    def __init__(self, cache: KVCache, layout: BatchLayout) -> None:
        self.cache = cache
        self.layout = layout
        self.device = layout.token_slots_T.device
        self.num_decode = layout.num_decode
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        # One row's slots: a slice where its pages are consecutive, else an index tensor.
        self.decode_slots_BL: Tensor | None = None
        self.decode_slice: slice | None = None
        if self.num_decode == 1 and is_run(layout.page_tables[0]):
            self.decode_slice = self._slice(0)
        elif self.num_decode:
            self._plan_decode()
        self.prefill_slots = [self._row_slots(r) for r in range(self.num_decode, len(layout.query_lens))]

    def _plan_decode(self) -> None:
        page_size = self.cache.page_size
        tables, lens = self.layout.page_tables[: self.num_decode], self.layout.kv_lens[: self.num_decode]
        longest = max(lens)
        width = -(-longest // page_size)
        padded = [(table[:width] + [PADDING_PAGE] * (width - len(table))) for table in tables]
        pages_BM = torch.tensor(padded, dtype=torch.int64)
        slots_BL = (pages_BM.unsqueeze(-1) * page_size + torch.arange(page_size)).flatten(1)[:, :longest]
        self.decode_lens_B = torch.tensor(lens, dtype=torch.int64)
        beyond_BL = torch.arange(longest) >= self.decode_lens_B.unsqueeze(1)
        # Lanes beyond a row's length read the padding page: what another request left in a page may be NaN.
        slots_BL = slots_BL.masked_fill(beyond_BL, PADDING_PAGE * page_size)
        self.decode_longest = longest
        self.decode_slots_BL = slots_BL.flatten().to(self.device)
        self.decode_lens_B = self.decode_lens_B.to(self.device)

    def _slice(self, row: int) -> slice:
        first = self.layout.page_tables[row][0] * self.cache.page_size
        return slice(first, first + self.layout.kv_lens[row])

    def _row_slots(self, row: int) -> slice | Tensor:
        pages, length, size = self.layout.page_tables[row], self.layout.kv_lens[row], self.cache.page_size
        if is_run(pages):
            return self._slice(row)
        slots = (torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)).flatten()[:length]
        return slots.to(self.device)

    # -- one layer

    def attend(self, spec: AttentionSpec, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        slots_T = self.layout.token_slots_T
        keys.index_copy_(0, slots_T, k_TGD.to(keys.dtype))
        values.index_copy_(0, slots_T, v_TGD.to(values.dtype))
        if self.num_decode == q_THD.shape[0]:
            return self._decode(spec, q_THD, keys, values)
        out_THD = torch.empty_like(q_THD)
        if self.num_decode:
            out_THD[: self.num_decode] = self._decode(spec, q_THD[: self.num_decode], keys, values)
        start = self.num_decode
        for i, slots in enumerate(self.prefill_slots):
            row = self.num_decode + i
            stop = start + self.layout.query_lens[row]
            out_THD[start:stop] = self._prefill(spec, row, q_THD[start:stop], _take(keys, slots), _take(values, slots))
            start = stop
        return out_THD

    def _decode(self, spec: AttentionSpec, q_BHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.decode_slice is not None:
            window = self.decode_slice
            if spec.window is not None:
                window = slice(max(window.start, window.stop - spec.window), window.stop)
            k_1LGD, v_1LGD = keys[window].unsqueeze(0), values[window].unsqueeze(0)
            return _attention(spec, q_BHD.unsqueeze(2), k_1LGD.transpose(1, 2), v_1LGD.transpose(1, 2), None).squeeze(2)
        assert self.decode_slots_BL is not None
        shape = (self.num_decode, self.decode_longest, spec.num_kv_heads, spec.head_dim)
        k_BGLD = keys.index_select(0, self.decode_slots_BL).view(shape).transpose(1, 2)
        v_BGLD = values.index_select(0, self.decode_slots_BL).view(shape).transpose(1, 2)
        mask = self._decode_mask(spec.window)
        return _attention(spec, q_BHD.unsqueeze(2), k_BGLD, v_BGLD, mask).squeeze(2)

    def _decode_mask(self, window: int | None) -> Tensor | None:
        """bool [B, 1, 1, L], True where a query may look; None where every lane of every row counts."""
        key = (-1, window)
        if key not in self._masks:
            position_L = torch.arange(self.decode_longest, device=self.device)
            lens_B1 = self.decode_lens_B.unsqueeze(1)
            seen_BL = position_L < lens_B1
            if window is not None:
                seen_BL &= position_L >= lens_B1 - window
            lens = self.layout.kv_lens[: self.num_decode]
            plain = min(lens) == self.decode_longest and (window is None or window >= self.decode_longest)
            self._masks[key] = None if plain else seen_BL[:, None, None, :]
        return self._masks[key]

    def _prefill(self, spec: AttentionSpec, row: int, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor) -> Tensor:
        q_1HQD, k_1GKD, v_1GKD = (x.transpose(0, 1).unsqueeze(0) for x in (q_QHD, k_KGD, v_KGD))
        queries, length = self.layout.query_lens[row], self.layout.kv_lens[row]
        causal = queries == length and (spec.window is None or spec.window >= length)
        mask = None if causal else self._prefill_mask(row, spec.window)
        return _attention(spec, q_1HQD, k_1GKD, v_1GKD, mask, causal=causal).squeeze(0).transpose(0, 1)

    def _prefill_mask(self, row: int, window: int | None) -> Tensor:
        """bool [Q, K]: query i stands at position K - Q + i."""
        key = (row, window)
        if key not in self._masks:
            queries, length = self.layout.query_lens[row], self.layout.kv_lens[row]
            query_Q1 = torch.arange(length - queries, length, device=self.device).unsqueeze(1)
            key_K = torch.arange(length, device=self.device)
            seen_QK = key_K <= query_Q1
            if window is not None:
                seen_QK &= key_K > query_Q1 - window
            self._masks[key] = seen_QK
        mask = self._masks[key]
        assert mask is not None
        return mask


def _take(cache: Tensor, slots: slice | Tensor) -> Tensor:
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)


def _attention(
    spec: AttentionSpec, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask: Tensor | None, *, causal: bool = False
) -> Tensor:
    k_BGKD, v_BGKD = k_BGKD.to(q_BHQD.dtype), v_BGKD.to(q_BHQD.dtype)
    grouped = spec.num_heads != spec.num_kv_heads
    if spec.softcap is None:
        return F.scaled_dot_product_attention(
            q_BHQD, k_BGKD, v_BGKD, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        k_BGKD, v_BGKD = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (k_BGKD, v_BGKD))
    scores = torch.matmul(q_BHQD, k_BGKD.transpose(-1, -2)).float() * spec.scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v_BGKD.dtype), v_BGKD)
