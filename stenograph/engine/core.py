"""The engine core: requests in, tokens out, one step at a time. Knows no text and no HTTP."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

from stenograph.config.resolve import Resolved
from stenograph.config.support import check_runnable
from stenograph.distributed.workers import make_executor
from stenograph.engine.types import EngineOutput, EngineRequest, EngineStats
from stenograph.errors import EngineDeadError, RequestError
from stenograph.executor.step import Step, StepResult, StepRow
from stenograph.loading.source import ModelSource
from stenograph.memory.page_allocator import PageAllocator
from stenograph.sampling.params import TokenLogprob
from stenograph.sampling.sampler import SamplingRow
from stenograph.scheduler.request import Request, ScheduledBatch, ScheduledRow
from stenograph.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineCore:
    """Owns the scheduler, the page allocator and the executor. Not thread-safe: one caller drives it.

    A request ends with exactly one output that has a `finish_reason`: "stop", "length", "abort", or "error" with the
    reason in `error`; from then on its pages are free.
    """

    def __init__(self, resolved: Resolved, source: ModelSource, *, progress: bool = True) -> None:
        check_runnable(resolved)
        self.resolved, self.facts = resolved, source.facts
        self.eos_token_ids: tuple[int, ...] = tuple(source.eos_token_ids)
        self.executor = make_executor(resolved, source, progress=progress)
        self.allocator = PageAllocator(self.executor.cache.num_pages)
        self.scheduler = Scheduler(
            self.allocator,
            page_size=resolved.page_size,
            max_running=resolved.max_running_requests,
            chunked_prefill_size=resolved.step_prefill_tokens,
        )
        self.context_length: int = resolved.context_length
        self.max_request_tokens = min(self.context_length, self.scheduler.max_tokens_of_one_request())
        self._requests: dict[str, Request] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self._seeds = random.Random(resolved.random_seed)
        self._stats = EngineStats(total_pages=self.allocator.capacity, page_size=resolved.page_size)

    # -- requests

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises `RequestError` for one that could never run."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if request.request_id in self._requests:
            raise RequestError(f"A request with id {request.request_id!r} is already running.", param="request_id")
        if not prompt:
            raise RequestError("The prompt is empty.", param="prompt", remedy="Send at least one token.")
        max_tokens = sampling.max_tokens if sampling.max_tokens is not None else self.max_request_tokens - len(prompt)
        total = len(prompt) + max_tokens
        if total > self.context_length or len(prompt) >= self.context_length + (max_tokens == 0):
            raise RequestError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {max_tokens}: together {total}, but the "
                f"context length is {self.context_length}.",
                param="prompt" if len(prompt) >= self.context_length else "max_tokens",
                code="context_length_exceeded",
                remedy="Shorten the prompt or lower max_tokens.",
            )
        held = max(total, len(prompt) + 1)  # with max_tokens 0 the whole prompt is stored: no last token to leave out
        if held > self.scheduler.max_tokens_of_one_request():
            raise RequestError(
                f"The request needs KV cache for {held} tokens; the whole cache holds {self.max_request_tokens}.",
                param="max_tokens",
                code="context_length_exceeded",
                remedy="Shorten the prompt or lower max_tokens, or start the server with more KV memory.",
            )
        entry = Request(
            request_id=request.request_id,
            prompt_len=len(prompt),
            token_ids=list(prompt),
            sampling=sampling,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            max_total=total,
            priority=request.priority,
        )
        self._requests[entry.request_id] = entry
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs[entry.request_id] = [None]
        self.scheduler.add(entry)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests at once, wherever they are; their pages are free on return. Unknown ids are passed over."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)
                outputs.append(EngineOutput(request_id=request_id, finish_reason="abort"))
        return outputs

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running, stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        stats.free_pages, stats.preemptions = self.allocator.num_free, self.scheduler.num_preemptions
        return stats

    def shutdown(self) -> None:
        self.executor.shutdown()

    # -- one step

    def step(self) -> list[EngineOutput]:
        """Runs one batch and returns what it produced, in the order of its rows."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self._stats.steps += 1
        try:
            result = self.executor.execute(self._step_of(batch))
        except EngineDeadError:
            raise
        except Exception as error:
            reason = f"The step failed: {type(error).__name__}."
            if type(error).__name__ == "OutOfMemoryError":
                reason = "The device ran out of memory. Lower --mem-fraction-static or --chunked-prefill-size."
            elif "CUDA" in str(error):  # the device's state can't be trusted any more
                raise EngineDeadError(f"The device failed: {error}") from error
            log.exception("A step failed; its requests end with an error")
            return [self._fail(row.request, reason) for row in batch.rows]
        self.scheduler.commit(batch)
        return self._outputs_of(batch, result)

    def _step_of(self, batch: ScheduledBatch) -> Step:
        return Step(rows=[self._row_of(row) for row in batch.rows], num_decode=batch.num_decode)

    def _row_of(self, row: ScheduledRow) -> StepRow:
        request, stop = row.request, row.start + row.count
        step_row = StepRow(
            token_ids=request.token_ids[row.start : stop],
            start=row.start,
            pages=request.pages,  # type: ignore[arg-type]  # page ids
            sampling=self._sampling_of(request) if row.samples else None,
        )
        known = self._prompt_logprobs.get(request.request_id)
        if known is not None and stop >= len(known):  # a preempted request computes some of them again
            step_row.prompt_logprobs = request.sampling.prompt_logprobs
            step_row.next_token_ids = request.token_ids[row.start + 1 : min(stop + 1, request.prompt_len)]
        return step_row

    def _sampling_of(self, request: Request) -> SamplingRow:
        sampling = request.sampling
        masked: tuple[int, ...] = ()
        if request.num_output < sampling.min_tokens:
            masked = (*self.eos_token_ids, *sampling.stop_token_ids)
        penalties = sampling.has_penalties
        return SamplingRow(
            params=sampling,
            seed=request.seed,
            position=len(request.token_ids),
            prompt_token_ids=request.token_ids[: request.prompt_len] if penalties else [],
            output_token_ids=request.output_token_ids if penalties else [],
            masked_token_ids=masked,
        )

    def _outputs_of(self, batch: ScheduledBatch, result: StepResult) -> list[EngineOutput]:
        outputs = []
        sampled = 0
        for index, row in enumerate(batch.rows):
            request = row.request
            if index in result.prompt_logprobs:
                known = self._prompt_logprobs[request.request_id]
                known += result.prompt_logprobs[index][len(known) - 1 - row.start :]
            if not row.samples:
                continue
            position, sampled = sampled, sampled + 1
            if request.num_output == 0:
                self._stats.prompt_tokens += request.prompt_len
            if position in result.nan_rows:
                outputs.append(self._fail(request, "The model's output is not a number (NaN) for this request."))
                continue
            logprob = result.logprobs[position] if result.logprobs is not None else None
            outputs.append(self._append(request, result.token_ids[position], logprob))
        return outputs

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None) -> EngineOutput:
        sampling = request.sampling
        output = EngineOutput(request_id=request.request_id)
        if request.num_output == 0:
            output.prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None)
        if len(request.token_ids) < request.max_total:
            request.token_ids.append(token)
            output.token_ids = [token]
            self._stats.generated_tokens += 1
            if sampling.logprobs is not None and logprob is not None:
                output.logprobs = [logprob]
            if request.num_output >= sampling.min_tokens:
                if token in sampling.stop_token_ids:
                    output.finish_reason, output.stop_reason = "stop", token
                elif token in self.eos_token_ids and not sampling.ignore_eos:
                    output.finish_reason = "stop"
        if output.finish_reason is None and len(request.token_ids) >= request.max_total:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self._forget(request)
        return output

    def _fail(self, request: Request, reason: str) -> EngineOutput:
        self._forget(request)
        return EngineOutput(request_id=request.request_id, finish_reason="error", error=reason)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        self._prompt_logprobs.pop(request.request_id, None)
