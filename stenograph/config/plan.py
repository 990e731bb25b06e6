"""The memory plan: what a model takes on a device, before anything is loaded. The arithmetic is the engine's own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stenograph.config.options import OPTIONS, EngineOptions
from stenograph.config.report import columns
from stenograph.config.resolve import Resolved, resolve
from stenograph.config.rules.parallel import valid_tp_sizes
from stenograph.errors import ConfigError, OutOfMemoryError
from stenograph.memory import arithmetic
from stenograph.memory.arithmetic import human_bytes, pages_that_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, and what fits. `kv_tokens` is what the pool holds; `batches` pairs a context length with the
    requests that fit at that length."""

    device: str
    device_bytes: int
    budget_bytes: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    page_size: int
    kv_pages: int
    kv_tokens: int
    kv_bytes: int
    activation_bytes: int
    workspace_bytes: int
    graph_bytes_least: int
    graph_bytes_most: int
    left_bytes: int
    batches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What everything but the KV cache takes, and what that leaves for it."""

    weights: int
    activations: int
    workspaces: int
    graphs: tuple[int, int]
    per_token: int
    left_for_kv: int


def _parts(resolved: Resolved) -> _Parts:
    facts, device = resolved.facts, resolved.device_facts
    on_gpu = device.kind == "cuda"
    shape: dict[str, Any] = {"dtype": resolved.dtype, "tp_size": resolved.tp_size}
    requests = resolved.max_running_requests
    weights = arithmetic.weight_bytes(facts, quantization=resolved.quantization, **shape)
    if not on_gpu:
        weights += arithmetic.dense_copy_bytes(
            facts, quantization=resolved.quantization, memory_bytes=device.memory_bytes, **shape
        )
    activations = arithmetic.activation_bytes(
        facts, tokens=max(resolved.step_prefill_tokens, requests), requests=requests, **shape
    )
    workspaces = arithmetic.workspace_bytes(
        requests=requests, context_length=resolved.context_length, page_size=resolved.page_size, on_gpu=on_gpu
    )
    graphs = arithmetic.graph_bytes(
        facts, batch_sizes=resolved.cuda_graph_bs, prefill_tokens=resolved.cuda_graph_prefill_tokens, **shape
    )
    left = arithmetic.kv_budget_bytes(
        total=device.memory_bytes, fraction=resolved.mem_fraction_static, weights=weights,
        elsewhere=activations + workspaces + graphs[1], on_gpu=on_gpu, tp_size=resolved.tp_size,
    )  # fmt: skip
    per_token = arithmetic.kv_bytes_per_token(facts, kv_dtype=resolved.kv_cache_dtype, tp_size=resolved.tp_size)
    return _Parts(
        weights=weights,
        activations=activations,
        workspaces=workspaces,
        graphs=graphs,
        per_token=per_token,
        left_for_kv=left,
    )


def _wanted_pages(resolved: Resolved) -> int:
    return arithmetic.wanted_pages(
        page_size=resolved.page_size,
        max_running_requests=resolved.max_running_requests,
        context_length=resolved.context_length,
        max_total_tokens=resolved.max_total_tokens,
    )


def _page_bytes(resolved: Resolved, parts: _Parts) -> int:
    on_gpu = resolved.device_facts.kind != "cpu"
    return arithmetic.budget_page_bytes(parts.per_token * resolved.page_size, on_gpu=on_gpu)


def plan_memory(resolved: Resolved) -> MemoryPlan:
    """The plan for resolved settings. Raises `OutOfMemoryError`, saying what would do, where the model doesn't fit."""
    parts, device = _parts(resolved), resolved.device_facts
    elsewhere = parts.activations + parts.workspaces + parts.graphs[1]
    try:
        pages = pages_that_fit(
            parts.left_for_kv,
            page_bytes=_page_bytes(resolved, parts),
            wanted_pages=_wanted_pages(resolved),
            what=device.name,
        )
    except OutOfMemoryError:
        raise OutOfMemoryError(
            _too_large(resolved, parts.weights, elsewhere), remedy=_what_would_do(resolved)
        ) from None
    kv_bytes = pages * resolved.page_size * parts.per_token
    return MemoryPlan(
        device=device.name,
        device_bytes=device.memory_bytes,
        budget_bytes=int(device.memory_bytes * resolved.mem_fraction_static),
        parameters=arithmetic.count_parameters(resolved.facts).total,
        weight_bytes=parts.weights,
        kv_bytes_per_token=parts.per_token,
        page_size=resolved.page_size,
        kv_pages=pages,
        kv_tokens=(pages - 1) * resolved.page_size,
        kv_bytes=kv_bytes,
        activation_bytes=parts.activations,
        workspace_bytes=parts.workspaces,
        graph_bytes_least=parts.graphs[0],
        graph_bytes_most=parts.graphs[1],
        left_bytes=device.memory_bytes - parts.weights - kv_bytes - elsewhere,
        batches=_batches(resolved, pages - 1),
    )


def as_json(plan: MemoryPlan, resolved: Resolved) -> dict[str, Any]:
    return {"plan": asdict(plan), "warnings": list(resolved.warnings), "errors": []}


def table(plan: MemoryPlan, resolved: Resolved) -> str:
    """The plan for people."""
    ranks = f" on each of {resolved.tp_size}" if resolved.tp_size > 1 else ""
    graphs = human_bytes(plan.graph_bytes_least)
    if plan.graph_bytes_most != plan.graph_bytes_least:
        graphs += f" to {human_bytes(plan.graph_bytes_most)}"
    stored = resolved.dtype if resolved.quantization == "none" else f"{resolved.quantization} and {resolved.dtype}"
    step = resolved.step_prefill_tokens
    decode, prefill = len(resolved.cuda_graph_bs), len(resolved.cuda_graph_prefill_tokens)
    fraction = f"{resolved.mem_fraction_static:g} of {human_bytes(plan.device_bytes)}"
    lines = columns(
        [
            ("memory" + ranks, "size", "how"),
            ("device", human_bytes(plan.device_bytes), plan.device),
            ("budget", human_bytes(plan.budget_bytes), f"mem_fraction_static {fraction}"),
            ("weights", human_bytes(plan.weight_bytes), f"{plan.parameters / 1e9:.2f} B parameters, {stored}"),
            ("activations", human_bytes(plan.activation_bytes), f"at most, for {step} tokens a step"),
            ("workspaces", human_bytes(plan.workspace_bytes), "page tables, attention workspace, CUDA context"),
            ("graphs", graphs, f"{decode} decode, {prefill} prefill"),
            ("KV cache", human_bytes(plan.kv_bytes), f"{plan.kv_pages - 1} pages of {plan.page_size}, one for padding"),
            ("left over", human_bytes(plan.left_bytes), "for the driver, other programs and fragmentation"),
        ]
    )  # fmt: skip
    lines += [
        "",
        f"KV: {plan.kv_bytes_per_token:,} bytes a token, {resolved.kv_cache_dtype}; {plan.kv_tokens:,} tokens fit.",
    ]
    lines += ["", *columns([("context", "requests at once"), *((f"{c:,}", f"{n:,}") for c, n in plan.batches)])]
    lines += [f"warning: {warning}" for warning in resolved.warnings]
    return "\n".join(lines)


def _batches(resolved: Resolved, pages: int) -> tuple[tuple[int, int], ...]:
    """Requests that fit at context lengths 1024, 4096 ... and the longest."""
    longest = resolved.context_length
    lengths = [c for c in (1024, 4096, 16384, 65536) if c < longest]
    return tuple(
        (c, min(resolved.max_running_requests, pages // -(-c // resolved.page_size))) for c in (*lengths, longest)
    )


def _too_large(resolved: Resolved, weights: int, elsewhere: int) -> str:
    device = resolved.device_facts
    return (
        f"{resolved.model} does not fit on {device.name}: weights take {human_bytes(weights)}, activations, workspaces "
        f"and graphs up to {human_bytes(elsewhere)}, of {resolved.mem_fraction_static:g} x "
        f"{human_bytes(device.memory_bytes)}, which leaves no page of KV cache"
    )


def _what_would_do(resolved: Resolved) -> str:
    """The first single change that makes room, tried out with the same rules and arithmetic."""
    device = resolved.device_facts
    changes: list[tuple[str, Any]] = [
        ("mem_fraction_static", f) for f in (0.9, 0.95) if f > resolved.mem_fraction_static
    ]
    changes += [("chunked_prefill_size", n) for n in (2048, 512) if n < resolved.step_prefill_tokens]
    if device.kind == "cuda":
        sizes = valid_tp_sizes(resolved.facts, device.count)
        changes += [("tp_size", n) for n in sizes if n > resolved.tp_size]
    for name, value in changes:
        options = EngineOptions(**{**resolved.options.set_values(), name: value})
        try:
            trial = resolve(options, resolved.facts, device)
        except ConfigError:
            continue
        parts = _parts(trial)
        if parts.left_for_kv >= 2 * _page_bytes(trial, parts):
            return f"{OPTIONS[name].flag} {value} would do."
    return "Use a smaller or quantised model, or a device with more memory."
