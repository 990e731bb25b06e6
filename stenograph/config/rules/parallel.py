"""Tensor parallelism."""

from __future__ import annotations

from typing import Any

from stenograph.config.facts import ModelFacts
from stenograph.config.passes import Conflict, View, register_post_process


def valid_tp_sizes(facts: ModelFacts, most: int) -> list[int]:
    """Sizes up to `most` that divide the heads and the MLP; key-value heads are divided or repeated."""
    kv = facts.num_kv_heads
    return [
        n
        for n in range(1, most + 1)
        if facts.num_heads % n == 0
        and (facts.mla is not None or kv % n == 0 or n % kv == 0)
        and facts.intermediate_size % n == 0
    ]


@register_post_process
def tensor_parallel(view: View) -> dict[str, Any]:
    """Rejects a tp_size that doesn't divide the model's heads, or that is more than there are devices."""
    size = view.tp_size
    if size == 1:
        return {}
    valid = valid_tp_sizes(view.facts, min(max(size, view.device.count), view.facts.num_heads))
    if size not in valid:
        raise Conflict(
            "tp_size", "model",
            message=f"{size} does not divide {view.facts.num_heads} heads ({view.facts.num_kv_heads} key-value heads) "
            f"and {view.facts.intermediate_size} MLP columns evenly.",
            remedy=f"Valid sizes: {', '.join(map(str, valid))}.",
        )  # fmt: skip
    if size > view.device.count:
        raise Conflict(
            "tp_size", "device",
            message=f"{size} devices are needed, and {view.device.name} has {view.device.count}.",
            remedy=f"Valid sizes: {', '.join(str(n) for n in valid if n <= view.device.count)}.",
        )  # fmt: skip
    return {}
