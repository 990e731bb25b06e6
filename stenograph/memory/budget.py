"""How many bytes there are, and how many KV pages fit in them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from stenograph.errors import OutOfMemoryError


def available_host_bytes() -> int:
    """Main memory that this process can still take: MemAvailable, or less where a control group says so."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def pages_that_fit(budget_bytes: int, *, page_bytes: int, wanted_pages: int, what: str) -> int:
    """Pages for the KV cache: what fits in the budget, at most `wanted_pages`, the padding page included.

    Raises `OutOfMemoryError` with the bytes missing where not even one page fits beside the padding page.
    """
    fitting = budget_bytes // page_bytes
    if fitting < 2:
        missing = 2 * page_bytes - max(budget_bytes, 0)
        raise OutOfMemoryError(
            f"There is no room for one page of KV cache on {what}: a page and the padding page take "
            f"{human_bytes(2 * page_bytes)}, {human_bytes(max(budget_bytes, 0))} are left, "
            f"{human_bytes(missing)} ({missing} bytes) are missing.",
            remedy="Raise --mem-fraction-static, lower --page-size or --chunked-prefill-size, or take a smaller model.",
        )
    return min(fitting, wanted_pages)


def human_bytes(count: int) -> str:
    """1536 -> "1.5 KiB" """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
