"""Decode speed: N streams side by side, each from a short prompt; optionally beside transformers in the same run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from stenograph.bench.report import report
from stenograph.bench.roofline import copy_bandwidth, step_bytes
from stenograph.bench.workloads import Workload, uniform
from stenograph.config.options import EngineOptions
from stenograph.engine.llm import LLM


def run(
    options: EngineOptions,
    *,
    streams: Sequence[int] = (1, 8, 16, 32),
    input_len: int = 32,
    output_len: int = 128,
    repeats: int = 3,
    compare: bool = False,
) -> dict[str, Any]:
    """Output tokens a second, prefill included, best of `repeats`; MBU against the copy bandwidth measured here."""
    llm = LLM.from_options(options)
    device = llm.resolved.device
    bandwidth = copy_bandwidth(device)
    vocab = llm.core.facts.vocab_size
    make = lambda n: uniform("decode", requests=n, input_len=input_len, output_len=output_len, vocab_size=vocab)  # noqa: E731
    reference = _Transformers(llm) if compare else None
    rows = []
    time_generate(llm, make(1))  # warm-up
    for count in streams:
        load = make(count)
        ours, theirs = [], []
        for _ in range(repeats):  # turn and turn about, so that both meet the same machine
            ours.append(time_generate(llm, load))
            if reference is not None:
                theirs.append(reference.time_generate(load))
        seconds = min(ours)
        step_seconds = seconds / output_len
        must_read = step_bytes(
            weight_bytes=llm.core.executor.model.step_weight_bytes(count),
            kv_bytes_per_token=llm.core.facts.kv_bytes_per_token(llm.core.executor.cache.keys[0].element_size()),
            streams=count,
            mean_context=input_len + output_len / 2,
        )
        row = {
            "streams": count,
            "tok/s": count * output_len / seconds,
            "ms a step": 1e3 * step_seconds,
            "MBU %": 100 * must_read / step_seconds / bandwidth,
        }
        if reference is not None:
            row["transformers tok/s"] = count * output_len / min(theirs)
            row["ratio"] = min(theirs) / seconds
        rows.append(row)
    first = rows[0]["tok/s"] / rows[0]["streams"]
    for row in rows:
        row["times one stream"] = row["tok/s"] / first
    return report(
        f"decode, {input_len} in, {output_len} out",
        rows,
        model=llm.resolved.model,
        device=device,
        dtype=llm.resolved.dtype,
        threads=torch.get_num_threads(),
        copy_gb_s=bandwidth / 1e9,
    )


def time_generate(llm: LLM, load: Workload) -> float:
    """Seconds from the first submission to the last token."""
    start = time.perf_counter()
    answers = llm.generate(load.prompts, load.params())
    seconds = time.perf_counter() - start
    made = sum(len(a.outputs[0].token_ids) for a in answers)
    assert made == load.num_output, f"{made} tokens came instead of {load.num_output}"
    return seconds


class _Transformers:
    """The same weights in transformers, in the dtype that our engine computes in."""

    def __init__(self, llm: LLM) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from stenograph.layers.linear import dense
        from stenograph.loading.source import open_model
        from stenograph.models.base import dtype_of

        resolved = llm.resolved
        source = open_model(resolved.model, load_format=resolved.load_format)
        dtype = dtype_of(resolved.dtype)
        known = {k: v for k, v in source.config.items() if k != "model_type"}
        config = AutoConfig.for_model(source.config["model_type"], **known)
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(resolved.device).eval()
        if source.format != "dummy":
            state = {name: dense(value, dtype) for name, value in source.weights()}
            missing, unexpected = self.model.load_state_dict(state, strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def time_generate(self, load: Workload) -> float:
        ids = torch.tensor(load.prompts, device=self.model.device)
        count = load.output_lens[0]
        start = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + count
        return seconds
