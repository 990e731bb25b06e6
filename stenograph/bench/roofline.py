"""What the machine allows: measured memory bandwidth, and the bytes that a decode step must read."""

from __future__ import annotations

import time

import torch


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy: the median of seven."""
    count = (1 << 28) if device == "cpu" else (1 << 32)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * count / sorted(times[1:])[3]


def step_bytes(*, weight_bytes: int, kv_bytes_per_token: int, streams: int, mean_context: float) -> float:
    """The least that one decode step reads: every weight once, each stream's KV once."""
    return weight_bytes + kv_bytes_per_token * streams * mean_context


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
