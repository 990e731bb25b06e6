"""The page allocator as a state machine: whatever is taken and given back, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from stenograph.memory.page_allocator import PADDING_PAGE, PageAllocator, PageId


class Pages(RuleBasedStateMachine):
    """`owned` is the model: who holds which pages. Everything else must be free."""

    holdings = Bundle("holdings")

    @initialize(num_pages=st.integers(2, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owned: set[PageId] = set()

    @rule(target=holdings, count=st.integers(0, 12))
    def take(self, count: int) -> tuple[PageId, ...]:
        free = self.allocator.num_free
        pages = self.allocator.allocate(count)
        if pages is None:
            assert count > free
            return ()
        assert len(pages) == count <= free
        assert len(set(pages)) == count and not self.owned & set(pages), "a page with two owners"
        self.owned |= set(pages)
        return tuple(pages)

    @rule(pages=consumes(holdings))
    def give_back(self, pages: tuple[PageId, ...]) -> None:
        self.allocator.free(pages)
        self.owned -= set(pages)

    @rule(pages=consumes(holdings), kept=st.integers(0, 12))
    def give_back_in_two_parts(self, pages: tuple[PageId, ...], kept: int) -> None:
        self.allocator.free(pages[kept:])
        self.allocator.free(pages[:kept])
        self.owned -= set(pages)

    @rule(data=st.data())
    def a_free_page_cannot_be_freed(self, data: st.DataObject) -> None:
        free = [PageId(p) for p in range(self.allocator.num_pages) if p not in self.owned]  # the padding page is one
        with pytest.raises(AssertionError):
            self.allocator.free([data.draw(st.sampled_from(free))])

    @invariant()
    def every_page_is_owned_or_free(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.num_free + len(self.owned) == self.allocator.capacity
            assert PADDING_PAGE not in self.owned

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.free(self.owned)
            everything = self.allocator.allocate(self.allocator.capacity)
            assert everything is not None and sorted(everything) == list(range(1, self.allocator.num_pages))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
