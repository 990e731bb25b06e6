"""How much memory weights and KV cache may take."""

from __future__ import annotations

from typing import Any

from stenograph.config.passes import View, because, register_post_process
from stenograph.memory.arithmetic import dynamic_bytes

_LEAST, _MOST = 0.5, 0.9


@register_post_process(fills=True)
def memory_fraction_default(view: View) -> dict[str, Any]:
    """Fills mem_fraction_static. CPU: half, since other programs live there too. GPU: what activations at the largest step,
    workspaces, graphs and the CUDA context leave, from 0.5 to 0.9."""
    if not view.is_default("mem_fraction_static"):
        return {}
    if view.device.kind == "cpu":
        return {"mem_fraction_static": because(0.5, "other programs share this memory")}
    if view.max_running_requests is None or view.chunked_prefill_size is None or view.dtype == "auto":
        return {}
    chunk = view.chunked_prefill_size
    needed = dynamic_bytes(
        view.facts, dtype=view.dtype, tokens=view.context_length if chunk == -1 else chunk,
        requests=view.max_running_requests, tp_size=view.tp_size, batch_sizes=view.cuda_graph_batch_sizes or (),
        prefill_tokens=view.cuda_graph_prefill_tokens or (),
    )  # fmt: skip
    share = int((1 - needed / view.device.memory_bytes) * 100) / 100
    share = max(_LEAST, min(_MOST, share))
    return {"mem_fraction_static": because(share, f"the largest step and its graphs take about {needed / 2**30:.1f} GiB")}
