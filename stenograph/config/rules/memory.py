"""How much of the device's memory the engine may take."""

from __future__ import annotations

import math
from typing import Any

from stenograph.config.passes import Conflict, View, because, register_post_process
from stenograph.memory.arithmetic import DTYPE_BYTES, human_bytes, reserve_bytes, weight_bytes

_MOST = 0.97
_DRIVER_BYTES = 256 << 20


@register_post_process(fills=True)
def memory_fraction_default(view: View) -> dict[str, Any]:
    """Fills mem_fraction_static: on a GPU all but 1 GiB (a 25th of a smaller one), since the KV cache is sized by what
    recording has left; on a CPU half of what the weights leave, since other programs live there."""
    if not view.is_default("mem_fraction_static"):
        return {}
    if view.device.kind == "cpu":
        return {"mem_fraction_static": because(0.5, "other programs share this memory")}
    total = view.device.memory_bytes
    reserve = reserve_bytes(total)
    fraction = math.floor(10000 * (1 - reserve / total)) / 10000
    return {"mem_fraction_static": because(fraction, f"all but {human_bytes(reserve)}, kept for fragmentation")}


@register_post_process
def memory_fraction_check(view: View) -> dict[str, Any]:
    """Rejects a memory fraction that doesn't hold the weights where a larger one would, and one that leaves the driver
    less than 256 MiB; both with the number that would do. (A model that is too large for the device at any fraction is
    for `steno plan` and the engine's start to tell.)"""
    fraction, dtype, quantization = view.mem_fraction_static, view.dtype, view.quantization
    if fraction is None or dtype not in DTYPE_BYTES or quantization is None or view.device.kind == "cpu":
        return {}
    total = view.device.memory_bytes
    weights = weight_bytes(view.facts, dtype=dtype, quantization=quantization, tp_size=view.tp_size)
    if fraction * total < weights <= _MOST * total:
        enough = math.ceil(100 * weights / total + 1) / 100
        raise Conflict(
            "mem_fraction_static", "model",
            message=f"{fraction:g} of {view.device.name}'s memory is {human_bytes(int(fraction * total))}, and the "
            f"weights take {human_bytes(weights)}.",
            remedy=f"Raise --mem-fraction-static to {enough:g} or more, or use a smaller model or --tp-size.",
        )  # fmt: skip
    if (1 - fraction) * total < _DRIVER_BYTES:
        enough = math.floor(100 * (1 - _DRIVER_BYTES / total)) / 100
        raise Conflict(
            "mem_fraction_static", "device",
            message=f"{fraction:g} leaves {human_bytes(int((1 - fraction) * total))} of {view.device.name}'s memory to "
            f"the driver, which needs {human_bytes(_DRIVER_BYTES)}.",
            remedy=f"Lower --mem-fraction-static to {enough:g} or less.",
        )  # fmt: skip
    return {}
