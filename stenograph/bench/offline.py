"""Offline throughput: a whole workload through `LLM.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stenograph.bench.decode import time_generate
from stenograph.bench.report import report
from stenograph.bench.workloads import named, uniform
from stenograph.config.options import EngineOptions
from stenograph.engine.llm import LLM


def run(
    options: EngineOptions, *, workloads: Sequence[str] = ("d1", "d32", "p"), requests: int | None = None
) -> dict[str, Any]:
    """D1, D32, P, W1, W1T by name; `requests` replaces each one's number."""
    llm = LLM.from_options(options)
    vocab = llm.core.facts.vocab_size
    time_generate(llm, uniform("warm-up", requests=2, input_len=64, output_len=8, vocab_size=vocab))
    rows = []
    for name in workloads:
        load = named(name, vocab, requests)
        seconds = time_generate(llm, load)
        rows.append(
            {
                "workload": load.name,
                "requests": len(load.prompts),
                "input tokens": load.num_input,
                "output tokens": load.num_output,
                "seconds": seconds,
                "output tok/s": load.num_output / seconds,
                "input tok/s": load.num_input / seconds,
            }
        )
    return report("offline", rows, model=llm.resolved.model, device=llm.resolved.device, dtype=llm.resolved.dtype)
