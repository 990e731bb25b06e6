"""The scheduler as a state machine: requests come, run, end and are aborted in any order; nothing leaks or starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stenograph.memory.page_allocator import PageAllocator
from stenograph.sampling.params import SamplingParams
from stenograph.scheduler.request import Request, ScheduledBatch, Status
from stenograph.scheduler.scheduler import Scheduler


class Serving(RuleBasedStateMachine):
    """Plays the engine core with an executor that makes up tokens."""

    @initialize(
        pages=st.integers(2, 30),
        page_size=st.sampled_from([1, 2, 4, 16]),
        running=st.integers(1, 6),
        chunk=st.integers(1, 16),
    )
    def start(self, pages: int, page_size: int, running: int, chunk: int) -> None:
        self.max_running, self.chunk = running, chunk
        self.scheduler = Scheduler(
            PageAllocator(pages + 1), page_size=page_size, max_running=running, chunked_prefill_size=chunk
        )
        self.alive: list[Request] = []
        self.count = 0

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 30), priority=st.sampled_from([0, 0, 0, 1]))
    def arrive(self, prompt: int, output: int, priority: int) -> None:
        room = self.scheduler.max_tokens_of_one_request()
        prompt = min(prompt, room - 1)
        total = min(prompt + output, room)
        self.count += 1
        request = Request(
            request_id=str(self.count),
            prompt_len=prompt,
            token_ids=list(range(prompt)),
            sampling=SamplingParams(max_tokens=total - prompt),
            seed=0,
            max_total=total,
            priority=priority,
        )
        self.scheduler.add(request)
        self.alive.append(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.alive))
        self.scheduler.remove(request)
        self.alive.remove(request)
        assert not request.pages and request.slot == -1

    @rule()
    def step(self) -> None:
        decoding = [r for r in self.scheduler.running if r.num_uncomputed == 1]
        line = sorted(self.alive, key=lambda r: (-r.priority, r.arrival))
        batch = self.scheduler.schedule()
        assert (batch is not None) == bool(self.alive), "an engine with work must not stand still"
        if batch is None:
            return
        self.check(batch)
        scheduled = {row.request for row in batch.rows}
        for request in decoding:
            assert request in scheduled or request.status is Status.WAITING, "a decode was passed over"
        if self.scheduler.running and self.scheduler.running[0] is line[0]:
            assert line[0] in scheduled, "the first in line made no progress"
        self.scheduler.commit(batch)
        for row in batch.rows:
            if row.samples:
                row.request.token_ids.append(7)
                if len(row.request.token_ids) == row.request.max_total:
                    self.scheduler.remove(row.request)
                    self.alive.remove(row.request)

    def check(self, batch: ScheduledBatch) -> None:
        counts = [row.count for row in batch.rows]
        assert all(count == 1 for count in counts[: batch.num_decode])
        assert all(count > 1 for count in counts[batch.num_decode :])
        assert len({row.request for row in batch.rows}) == len(counts) <= self.max_running
        assert sum(counts[batch.num_decode :]) <= self.chunk
        for row in batch.rows:
            request = row.request
            assert request.status is Status.RUNNING and row.start == request.num_computed
            assert len(request.pages) * self.scheduler.page_size >= row.start + row.count, "tokens without a page"

    @invariant()
    def everything_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        owned = [page for request in self.alive for page in request.pages]
        slots = [request.slot for request in scheduler.running]
        assert len(owned) == len(set(owned))
        assert len(owned) + scheduler.allocator.num_free == scheduler.allocator.capacity, "pages leaked"
        assert sorted([*slots, *scheduler._free_slots]) == list(range(self.max_running)), "slots leaked"
        assert set(scheduler.requests()) == set(self.alive), "a request was lost"
        for request in scheduler.waiting:
            assert not request.pages and request.slot == -1 and request.num_computed == 0
        order = [(-r.priority, r.arrival) for r in scheduler.waiting]
        assert order == sorted(order), "the waiting line is out of order"

    def teardown(self) -> None:
        """From any state, everything ends in a bounded number of steps: nobody starves."""
        if not hasattr(self, "scheduler"):
            return
        # The first in line advances in every step, unless it is preempted (then it isn't the first) or newly admitted.
        bound = 10 + 2 * sum(request.max_total for request in self.alive)
        for _ in range(bound):
            if not self.alive:
                break
            self.step()
            self.everything_has_one_owner()
        assert not self.alive, "requests starve"
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.capacity


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
