"""The KV cache's tensors: for each layer one for keys and one for values, in pages.

Shapes: P pages, S tokens a page, G KV heads on this rank, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stenograph.memory.page_allocator import PADDING_PAGE


class KVCache:
    """keys[layer] and values[layer] are [P * S, G, D]: a token's row is its `TokenSlot`, a page S consecutive rows.

    The memory is not cleared (on a CPU it isn't even touched before it is used), but for the padding page, which masked
    lanes read.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        self.keys: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        padding = slice(PADDING_PAGE * page_size, (PADDING_PAGE + 1) * page_size)
        for tensor in (*self.keys, *self.values):
            tensor[padding] = 0

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))
