"""The scheduler against a stand-in executor that only counts: no torch anywhere."""

from __future__ import annotations

import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.memory.page_allocator import PageAllocator
from stenograph.sampling.params import SamplingParams
from stenograph.scheduler.request import Request, ScheduledBatch, Status
from stenograph.scheduler.scheduler import Scheduler


def make(num_pages: int, *, page_size: int = 4, max_running: int = 4, chunk: int = 8) -> Scheduler:
    return Scheduler(
        PageAllocator(num_pages + 1), page_size=page_size, max_running=max_running, chunked_prefill_size=chunk
    )


def request(name: str, prompt: int, output: int, priority: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_len=prompt,
        token_ids=list(range(prompt)),
        sampling=SamplingParams(max_tokens=output),
        seed=0,
        max_total=prompt + output,
        priority=priority,
    )


def run(scheduler: Scheduler, batch: ScheduledBatch) -> list[Request]:
    """Plays the executor and the engine core: one token for each row that samples. Returns what finished."""
    for row in batch.rows:
        assert len(row.request.pages) * scheduler.page_size >= row.start + row.count, "tokens without a page"
        assert row.start == row.request.num_computed and row.count > 0
    owned = [page for r in scheduler.running for page in r.pages]
    assert len(owned) == len(set(owned)), "a page with two owners"
    assert len(owned) + scheduler.allocator.num_free == scheduler.allocator.capacity
    scheduler.commit(batch)
    finished = []
    for row in batch.rows:
        if row.samples:
            row.request.token_ids.append(0)
            if len(row.request.token_ids) >= row.request.max_total:
                scheduler.remove(row.request)
                finished.append(row.request)
    return finished


def drain(scheduler: Scheduler, limit: int = 10_000) -> list[Request]:
    finished = []
    for _ in range(limit):
        if not scheduler.has_work():
            return finished
        batch = scheduler.schedule()
        assert batch is not None, "work is waiting, but nothing was scheduled"
        finished += run(scheduler, batch)
    raise AssertionError("did not come to an end")


def test_prompts_are_chunked_and_decode_rides_along_in_every_step() -> None:
    scheduler = make(100, chunk=8)
    scheduler.add(request("short", 3, 50))
    run(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    scheduler.add(request("long", 30, 2))
    counts = []
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        assert batch.rows[0].request.request_id == "short" and batch.rows[0].count == 1
        counts.append(batch.rows[1].count)
        run(scheduler, batch)
    assert counts == [8, 8, 8, 6]


def test_last_chunk_at_a_page_edge_is_never_empty() -> None:
    for prompt in range(1, 40):
        scheduler = make(100, chunk=8)
        scheduler.add(request("a", prompt, 3))
        assert [r.request_id for r in drain(scheduler)] == ["a"]


def test_single_token_rows_come_first() -> None:
    scheduler = make(100, chunk=8, max_running=8)
    for name, prompt in (("a", 5), ("b", 1), ("c", 9)):
        scheduler.add(request(name, prompt, 4))
    while scheduler.has_work():
        batch = scheduler.schedule()
        assert batch is not None
        counts = [row.count for row in batch.rows]
        assert all(c == 1 for c in counts[: batch.num_decode]) and all(c > 1 for c in counts[batch.num_decode :])
        assert sum(c for c in counts[batch.num_decode :]) <= 8
        run(scheduler, batch)


def test_a_full_pool_makes_a_newcomer_wait_and_everyone_finishes() -> None:
    """A 2k prompt arrives while others hold nearly all pages: it waits; nothing fails to allocate."""
    scheduler = make(16, page_size=4, max_running=8, chunk=4)
    scheduler.add(request("a", 20, 20))
    scheduler.add(request("b", 16, 4))
    run(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    scheduler.add(request("big", 40, 8))
    finished = drain(scheduler)
    assert sorted(r.request_id for r in finished) == ["a", "b", "big"]
    assert scheduler.allocator.num_free == 16


def test_preemption_takes_from_the_last_and_recomputes_all_its_tokens() -> None:
    scheduler = make(6, page_size=2, max_running=4, chunk=16)
    first, second = request("first", 3, 8), request("second", 3, 8)
    scheduler.add(first)
    scheduler.add(second)
    finished = drain(scheduler)
    assert [r.request_id for r in finished] == ["first", "second"]
    assert first.num_preemptions == 0 and second.num_preemptions >= 1
    assert len(second.token_ids) == 11 and scheduler.allocator.num_free == 6


def test_priority_goes_first() -> None:
    scheduler = make(100, max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5)):
        scheduler.add(request(name, 4, 2, priority))
    assert [r.request_id for r in drain(scheduler)] == ["urgent", "a", "b"]


def test_abort_in_every_state_frees_everything() -> None:
    scheduler = make(20, page_size=2, chunk=4)
    waiting, chunking, decoding = request("w", 30, 4), request("c", 9, 4), request("d", 2, 9)
    scheduler.add(decoding)
    run(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    scheduler.add(chunking)
    run(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    scheduler.add(waiting)
    assert (decoding.status, chunking.status, waiting.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    for r in (waiting, chunking, decoding):
        scheduler.remove(r)
        assert r.status is Status.FINISHED
    assert scheduler.allocator.num_free == 20 and not scheduler.has_work()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pages=st.integers(4, 40),
    page_size=st.sampled_from([1, 2, 4, 16]),
    running=st.integers(1, 6),
    chunk=st.integers(1, 20),
)
def test_no_request_is_lost_whatever_the_load(seed: int, pages: int, page_size: int, running: int, chunk: int) -> None:
    rng = random.Random(seed)
    scheduler = make(pages, page_size=page_size, max_running=running, chunk=chunk)
    room = scheduler.max_tokens_of_one_request()
    expected, finished = set(), []
    for i in range(12):
        prompt = rng.randint(1, room - 1)
        r = request(str(i), prompt, rng.randint(1, min(20, room - prompt)), rng.choice([0, 0, 1]))
        scheduler.add(r)
        expected.add(r.request_id)
        for _ in range(rng.randint(0, 6)):
            batch = scheduler.schedule()
            if batch is not None:
                assert batch.num_tokens - batch.num_decode <= chunk
                finished += run(scheduler, batch)
        if rng.random() < 0.2 and scheduler.has_work():
            victim = rng.choice(list(scheduler.requests()))
            scheduler.remove(victim)
            expected.discard(victim.request_id)
    finished += drain(scheduler)
    assert sorted(r.request_id for r in finished) == sorted(expected)
    assert all(len(r.token_ids) == r.max_total for r in finished)
    assert scheduler.allocator.num_free == pages
    assert sorted(scheduler._free_slots) == list(range(running))


def test_imports_no_torch() -> None:
    code = "import sys, stenograph.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
