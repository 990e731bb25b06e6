from __future__ import annotations

import pytest

from stenograph.errors import OutOfMemoryError
from stenograph.memory.budget import pages_that_fit
from stenograph.memory.page_allocator import PADDING_PAGE, PageAllocator


def test_hands_out_every_page_but_the_padding_page_once() -> None:
    allocator = PageAllocator(9)
    pages = allocator.allocate(8)
    assert pages is not None and sorted(pages) == list(range(1, 9)) and PADDING_PAGE not in pages
    assert allocator.allocate(1) is None and allocator.num_free == 0


def test_refusal_changes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_freeing_twice_or_a_foreign_page_is_a_defect() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])
    with pytest.raises(AssertionError):
        allocator.free([PADDING_PAGE])


def test_lone_requests_get_consecutive_pages() -> None:
    allocator = PageAllocator(40)
    for _ in range(3):
        first, second = allocator.allocate(5), allocator.allocate(1)
        assert first is not None and second is not None
        pages = first + second
        assert pages == list(range(pages[0], pages[0] + 6))
        allocator.free(pages)


def test_no_room_for_one_page_says_how_much_is_missing() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1\.5 KiB \(1536 bytes\) are missing"):
        pages_that_fit(512, page_bytes=1024, wanted_pages=10, what="cpu")
    with pytest.raises(OutOfMemoryError, match="2048 bytes"):
        pages_that_fit(-5, page_bytes=1024, wanted_pages=10, what="cpu")
    assert pages_that_fit(5000, page_bytes=1024, wanted_pages=10, what="cpu") == 4
    assert pages_that_fit(50000, page_bytes=1024, wanted_pages=10, what="cpu") == 10
