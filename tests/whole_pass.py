"""One whole forward pass of one sequence through our model, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stenograph.attention.base import BatchLayout
from stenograph.attention.torch_native import TorchNativeBackend
from stenograph.memory.kv_cache import KVCache


@torch.inference_mode()
def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]."""
    spec = model.layers[0].self_attn.spec
    cache = KVCache(
        num_layers=model.facts.num_layers,
        num_pages=len(ids) + 1,
        page_size=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.build.dtype,
        device=model.build.device,
    )
    positions = torch.arange(len(ids), device=model.build.device)
    layout = BatchLayout(
        num_decode=int(len(ids) == 1),
        query_lens=[len(ids)],
        kv_lens=[len(ids)],
        page_tables=[list(range(1, len(ids) + 1))],
        token_slots_T=positions + 1,
    )
    plan = TorchNativeBackend(cache).plan(layout)
    return model.logits(model.forward(torch.tensor(ids, device=positions.device), positions, plan))
