"""Which KV pages are free. Plain Python: the tensors live in `kv_cache.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

PageId = NewType("PageId", int)
"""A page of the KV cache: `page_size` consecutive token slots."""

TokenSlot = NewType("TokenSlot", int)
"""One token's place in the KV cache: page id * page_size + offset. Never to be mixed up with a page id."""

PADDING_PAGE = PageId(0)
"""Reserved for ever: padded rows may write here and masked lanes read here; no request owns it."""


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1; page 0 is `PADDING_PAGE`.

    Pages come lowest first after start, then in the order in which they were freed last, so that a lone request tends
    to sit in one run of consecutive pages. Freeing a page that isn't taken is a defect of ours and asserts.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "one page for padding and at least one to hand out"
        self.num_pages = num_pages
        self._free: list[PageId] = [
            PageId(p) for p in range(num_pages - 1, 0, -1)
        ]  # a stack; the top is handed out next
        self._taken = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Pages that requests can own, free or not."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[PageId] | None:
        """`count` pages, or None (and no change) where fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: Iterable[PageId]) -> None:
        """Gives pages back. Their contents may be overwritten from now on."""
        returned = list(pages)
        for page in returned:
            assert self._taken[page], f"page {page} freed twice"
            self._taken[page] = 0
        self._free.extend(reversed(returned))
