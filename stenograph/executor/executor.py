"""A step's rows -> tensors -> forward pass -> sampled tokens, on one rank.

Shapes: T tokens of the step, N rows that need logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from stenograph.attention.base import BatchLayout
from stenograph.attention.torch_native import TorchNativeBackend
from stenograph.config.resolve import Resolved
from stenograph.distributed.tensor_parallel import TensorParallel
from stenograph.executor.step import Step, StepResult, StepRow
from stenograph.layers.linear import Build
from stenograph.loading.loader import load_model
from stenograph.loading.source import ModelSource
from stenograph.memory.arithmetic import (
    activation_bytes,
    budget_page_bytes,
    dense_copy_bytes,
    kv_budget_bytes,
    wanted_pages,
)
from stenograph.memory.budget import available_host_bytes, human_bytes, pages_that_fit
from stenograph.memory.kv_cache import KVCache
from stenograph.models.base import dtype_of
from stenograph.models.registry import build_model
from stenograph.sampling.params import SamplingParams
from stenograph.sampling.sampler import SamplingBatch, SamplingRow, logprobs_of, sample

log = logging.getLogger(__name__)


class Executor:
    """Owns the model and the KV cache of one rank. Every rank is given the same steps and samples the same tokens."""

    def __init__(self, resolved: Resolved, source: ModelSource, tp: TensorParallel, *, progress: bool = True) -> None:
        self.resolved, self.facts, self.tp = resolved, source.facts, tp
        self.device = torch.device("cuda", tp.rank) if resolved.device == "cuda" else torch.device(resolved.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif resolved.threads:
            torch.set_num_threads(resolved.threads)
        self.page_size: int = resolved.page_size
        copies = self.device.type == "cpu" and dense_copy_bytes(
            self.facts,
            dtype=resolved.dtype,
            quantization=resolved.quantization,
            memory_bytes=available_host_bytes(),
            tp_size=tp.size,
        )
        build = Build(device=self.device, dtype=dtype_of(resolved.dtype), tp=tp, dense_copies=copies > 0)
        with torch.inference_mode():
            self.model = build_model(build, self.facts, resolved.context_length)
            load_model(source, self.model, rank=tp.rank, world_size=tp.size, progress=progress)
            self.cache = self._make_cache()
        self.backend = TorchNativeBackend(self.cache)
        log.info(
            "KV cache: %d pages of %d tokens, %s",
            self.cache.num_pages,
            self.page_size,
            human_bytes(self.cache.num_bytes),
        )

    # -- memory

    def _make_cache(self) -> KVCache:
        resolved = self.resolved
        on_gpu = self.device.type == "cuda"
        page_bytes = budget_page_bytes(self._cache_of(2).num_bytes // 2, on_gpu=on_gpu)
        wanted = wanted_pages(
            page_size=self.page_size,
            max_running_requests=resolved.max_running_requests,
            context_length=resolved.context_length,
            max_total_tokens=resolved.max_total_tokens,
        )
        budget = self._measured_device_budget() if on_gpu else self._host_budget()
        pages = pages_that_fit(budget, page_bytes=page_bytes, wanted_pages=wanted, what=str(self.device))
        if self.tp.size > 1:  # all ranks agree on the smallest
            smallest = torch.tensor([pages], device=self.device)
            torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=self.tp.group)
            pages = int(smallest.item())
        asked = resolved.options.max_total_tokens
        if asked is not None and pages < wanted:
            log.warning("max_total_tokens is %d, but memory holds %d", asked, (pages - 1) * self.page_size)
        return self._cache_of(pages)

    def _cache_of(self, num_pages: int) -> KVCache:
        layer: Any = self.model.layers[0]
        spec = layer.self_attn.spec
        kv_dtype = self.resolved.kv_cache_dtype
        return KVCache(
            num_layers=self.facts.num_layers,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.build.dtype if kv_dtype == "auto" else dtype_of(kv_dtype),
            device=self.device,
        )

    def _host_budget(self) -> int:
        """Bytes for the KV cache in main memory, of what the weights have left there."""
        if self.tp.size > 1:
            torch.distributed.barrier(self.tp.group)  # until every rank's weights are in memory
        resolved, tp_size, requests = self.resolved, self.tp.size, self.resolved.max_running_requests
        weights = self.model.weight_bytes()
        tokens = max(resolved.step_prefill_tokens, requests)
        return kv_budget_bytes(
            total=available_host_bytes() + weights * tp_size,
            fraction=resolved.mem_fraction_static,
            weights=weights,
            elsewhere=activation_bytes(
                self.facts, dtype=resolved.dtype, tokens=tokens, requests=requests, tp_size=tp_size
            ),
            on_gpu=False,
            tp_size=tp_size,
        )

    def _measured_device_budget(self) -> int:
        """Bytes for the KV cache on a GPU: the fraction of its memory, less what is in use, less the measured peak of
        the largest prefill step and of sampling for a full batch in the way that needs the most memory."""
        tokens = self.resolved.step_prefill_tokens
        pages = -(-tokens // self.page_size) + 1
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        cache = self._cache_of(pages)
        row = StepRow(token_ids=[0] * tokens, start=0, pages=list(range(1, pages)), sampling=None)
        hidden_TE = self._forward(TorchNativeBackend(cache), Step(rows=[row], num_decode=0))
        rows = self.resolved.max_running_requests
        flat = SamplingParams(temperature=100.0, top_p=0.999, logprobs=1)  # nearly all tokens are kept: a whole sort
        hidden_NE = hidden_TE[-1:].expand(rows, -1).contiguous()
        sample(self.model.logits(hidden_NE), SamplingBatch.build([SamplingRow(params=flat, seed=0, position=0)] * rows))
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del cache, hidden_TE, hidden_NE
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = self.resolved.mem_fraction_static
        return kv_budget_bytes(total=total, fraction=fraction, weights=total - free, elsewhere=peak, on_gpu=True)

    # -- one step

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        hidden_TE = self._forward(self.backend, step)
        last_N, sampled, offset = [], [], 0
        prompt_logprobs = {}
        for index, row in enumerate(step.rows):
            if row.prompt_logprobs is not None and row.next_token_ids:
                hidden = hidden_TE[offset : offset + len(row.next_token_ids)]
                prompt_logprobs[index] = self._prompt_logprobs(hidden, row)
            offset += len(row.token_ids)
            if row.sampling is not None:
                last_N.append(offset - 1)
                sampled.append(row.sampling)
        if not sampled:
            return StepResult(token_ids=[], logprobs=None, nan_rows=set(), prompt_logprobs=prompt_logprobs)
        if len(last_N) != hidden_TE.shape[0]:
            hidden_TE = hidden_TE.index_select(0, torch.tensor(last_N, device=self.device))
        logits_NV = self.model.logits(hidden_TE)
        out = sample(logits_NV, SamplingBatch.build(sampled))
        return StepResult(
            token_ids=out.token_ids.tolist(),
            logprobs=out.logprobs,
            nan_rows=set(out.nan_rows),
            prompt_logprobs=prompt_logprobs,
        )

    def _forward(self, backend: TorchNativeBackend, step: Step) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.page_size
        for row in step.rows:
            stop = row.start + len(row.token_ids)
            ids += row.token_ids
            positions += range(row.start, stop)
            slots += [row.pages[p // size] * size + p % size for p in range(row.start, stop)]
        packed = torch.tensor([ids, positions, slots], dtype=torch.int64).to(self.device, non_blocking=True)
        layout = BatchLayout(
            num_decode=step.num_decode,
            query_lens=[len(row.token_ids) for row in step.rows],
            kv_lens=[row.start + len(row.token_ids) for row in step.rows],
            page_tables=[row.pages for row in step.rows],
            token_slots_T=packed[2],
        )
        return self.model.forward(packed[0], packed[1], backend.plan(layout))

    def _prompt_logprobs(self, hidden_TE: Tensor, row: StepRow) -> list:
        """In slices, so that the logits of a long chunk don't need much memory at once."""
        found = []
        for start in range(0, len(row.next_token_ids), 256):
            targets = row.next_token_ids[start : start + 256]
            logits = self.model.logits(hidden_TE[start : start + len(targets)])
            found += logprobs_of(logits, targets, row.prompt_logprobs or 0)
        return found

    def shutdown(self) -> None:
        """Nothing runs outside this process."""
