"""Continuous batching: which requests run in the next step, with how many tokens. No torch.

Every step takes one token of each request that decodes, then fills up with prefill chunks, at most
`chunked_prefill_size` tokens of them: so a decode never waits longer than one chunk, however long a prompt is.

A request is admitted when a slot is free and the pages of all its known tokens are, so a prompt that has begun always
ends. Pages for decoding are taken as needed; when none is left, the request that came last gives its pages back and
starts again later from its tokens (preemption with recomputation): nothing is lost, and the oldest always finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from stenograph.memory.page_allocator import PageAllocator
from stenograph.scheduler.request import Request, ScheduledBatch, ScheduledRow, Status


class Scheduler:
    """
    max_running           slots; requests running at the same time
    chunked_prefill_size  prefill tokens a step
    page_size             tokens a page
    """

    def __init__(
        self, allocator: PageAllocator, *, page_size: int, max_running: int, chunked_prefill_size: int
    ) -> None:
        assert page_size > 0 and max_running > 0 and chunked_prefill_size > 0
        self.allocator = allocator
        self.page_size = page_size
        self.chunk = chunked_prefill_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._arrivals = 0

    # -- requests come and go

    def add(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1
        self._queue(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its pages and slot at once."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        request.status = Status.FINISHED

    def max_tokens_of_one_request(self) -> int:
        """Tokens that a request alone could hold in all pages, the last sampled one (never stored) included."""
        return self.allocator.capacity * self.page_size + 1

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- one step

    def schedule(self) -> ScheduledBatch | None:
        """The next step's rows, their pages allocated; None where nothing can run."""
        decode: list[ScheduledRow] = []
        prefill: list[ScheduledRow] = []
        budget = self.chunk
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # an older one has just taken its pages; victims come last
                continue
            if request.num_uncomputed == 1:
                if self._make_room(request):
                    decode.append(ScheduledRow(request=request, start=request.num_computed, count=1))
            elif budget > 0:
                row = self._chunk_of(request, budget)
                budget -= row.count
                prefill.append(row)
        while budget > 0 and self.waiting and self._free_slots and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            row = self._chunk_of(request, budget)
            budget -= row.count
            (decode if row.count == 1 else prefill).append(row)
        if not decode and not prefill:
            return None
        singles = [row for row in prefill if row.count == 1]
        many = [row for row in prefill if row.count > 1]
        return ScheduledBatch(rows=(*decode, *singles, *many), num_decode=len(decode) + len(singles))

    def commit(self, batch: ScheduledBatch) -> None:
        """The step ran: its tokens' KV is in the pages now."""
        for row in batch.rows:
            if row.request.status is Status.RUNNING:
                row.request.num_computed = row.start + row.count

    # -- inner workings

    def _chunk_of(self, request: Request, budget: int) -> ScheduledRow:
        return ScheduledRow(
            request=request, start=request.num_computed, count=min(budget, request.num_uncomputed)
        )

    def _pages_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.page_size) - len(request.pages))

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request its slot and the pages of all its tokens, if they are free.

        A page for each running request stays free while others run, so that admission doesn't cause preemption at once.
        """
        need = self._pages_missing(request, len(request.token_ids))
        headroom = len(self.running) if self.running else 0
        if need + headroom > self.allocator.num_free:
            return False
        pages = self.allocator.allocate(need)
        assert pages is not None
        request.pages.extend(pages)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        index = len(self.running)
        while index and self._before(request, self.running[index - 1]):
            index -= 1
        self.running.insert(index, request)
        return True

    def _make_room(self, request: Request) -> bool:
        """Pages for the request's next token, from the free ones or from the request that came last.

        False where the request itself was the last: it is preempted.
        """
        need = self._pages_missing(request, request.num_computed + 1)
        while need > self.allocator.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        pages = self.allocator.allocate(need)
        assert pages is not None
        request.pages.extend(pages)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.num_preemptions += 1
        self._queue(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(request.pages)
        request.pages = []
        self._free_slots.append(request.slot)
        request.slot = -1

    def _queue(self, request: Request) -> None:
        """Into the waiting line: higher priority first, then by arrival."""
        request.status = Status.WAITING
        position = len(self.waiting)
        while position and self._before(request, self.waiting[position - 1]):
            position -= 1
        self.waiting.insert(position, request)

    @staticmethod
    def _before(a: Request, b: Request) -> bool:
        return (-a.priority, a.arrival) < (-b.priority, b.arrival)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
