"""How each phase is recorded, and in which sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stenograph.config.capabilities import capabilities
from stenograph.config.passes import Conflict, View, because, register_post_process
from stenograph.config.rules.attention import backends_in_use

DECODE, PREFILL = "cuda_graph_backend_decode", "cuda_graph_backend_prefill"
_LONGEST_UNCUT = 16384


def batch_ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to record up to `most`, which is always among them: 1, 2, 4, 8, then steps that widen with size."""
    return _ladder(most, ((1, 2), (2, 4), (4, 8), (8, 64), (16, 256), (32, 512), (64, 1024), (128, 4096)))


def token_ladder(most: int) -> tuple[int, ...]:
    """Token counts to record up to `most`, which is always among them; padding stays within a third beyond 64
    tokens."""
    return _ladder(
        most, ((16, 64), (32, 128), (64, 256), (128, 512), (256, 1024), (512, 2048), (1024, 4096), (2048, 16384))
    )


def _ladder(most: int, stretches: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    sizes, size = [], 0
    for step, end in stretches:
        size = max(size, step) if not size else size + step
        while size <= min(end, most):
            sizes.append(size)
            size += step
        size = sizes[-1] if sizes else 0
    return (*sizes, most) if most not in sizes else tuple(sizes)


def _choose(view: View, phase: str) -> tuple[str, str]:
    """The best recording backend of a phase and the reason."""
    in_use = backends_in_use(view)
    built = view.support.decode_graphs if phase == DECODE else view.support.prefill_graphs
    if view.device.kind == "cpu":
        return "disabled", "a CPU has no launches to save (trace records and replays there, for checks)"
    if view.prefill_attention_backend is None or view.decode_attention_backend is None:
        return "disabled", "no attention backend yet"
    if phase == DECODE:
        caps = capabilities(view.decode_attention_backend, mla=view.use_mla_backend())
        order = [b for b in ("full", "piecewise") if b in caps.decode_graphs]
        reason = (
            "one graph replays the whole step" if order[:1] == ["full"] else f"{caps.label} stays outside the graph"
        )
    elif all("full" in caps.prefill_graphs for caps in in_use):
        order, reason = ["full", "piecewise"], "every attention backend in use can be recorded in full"
    else:
        order, reason = ["piecewise"], "attention stays outside the graph, so any prompt length fits"
    for backend in order:
        if backend in built:
            return backend, reason
    return "disabled", f"{order[0] if order else 'recording'} is not in this version yet"


@register_post_process(fills=True)
def graph_backend_default(view: View) -> dict[str, Any]:
    """Fills the recording backend of each phase. Decode: full. Prefill: piecewise on a GPU unless every attention
    backend in use declares full. Disabled on a CPU, and where none of it is built."""
    return {phase: because(*_choose(view, phase)) for phase in (DECODE, PREFILL) if view.is_default(phase)}


@register_post_process
def graph_backend_supported(view: View) -> dict[str, Any]:
    """Adjusts a recording backend that can't be: CUDA graphs on a CPU, trace on a GPU, a decode graph that the
    attention backend can't be in. (A full prefill graph that it can't be in is rejected: full_prefill_graph.)"""
    changes: dict[str, Any] = {}
    for phase in (DECODE, PREFILL):
        asked = view.asked(phase)
        if asked is None or asked == "disabled":
            continue
        gpu = view.device.kind == "cuda"
        if gpu and asked == "trace":
            why = "trace stands in for graphs where there is no GPU"
        elif not gpu and asked != "trace":
            built = view.support.decode_graphs if phase == DECODE else view.support.prefill_graphs
            changes[phase] = because("trace" if "trace" in built else "disabled", "CUDA graphs need a GPU")
            continue
        elif gpu and phase == DECODE and view.decode_attention_backend is not None:
            caps = capabilities(view.decode_attention_backend, mla=view.use_mla_backend())
            if asked in caps.decode_graphs:
                continue
            why = f"{caps.label} cannot be in a {asked} decode graph"
        else:
            continue
        changes[phase] = because(_choose(view, phase)[0], why)
    return changes


@register_post_process
def full_prefill_graph(view: View) -> dict[str, Any]:
    """Full prefill graphs work at every page size that the attention backend declares, and hold
    cuda_graph_prefill_slots request slots. A backend that can't be in one is rejected, naming both."""
    if view.cuda_graph_backend_prefill != "full" or view.prefill_attention_backend is None:
        return {}
    caps = capabilities(view.prefill_attention_backend, mla=view.use_mla_backend())
    if "full" not in caps.prefill_graphs:
        raise Conflict(
            PREFILL, "prefill_attention_backend", message=f"{caps.label} cannot be recorded in a full prefill graph.",
            remedy=f"Use --cuda-graph-backend-prefill piecewise, or {_able(view)}.",
        )  # fmt: skip
    return {}


def _able(view: View) -> str:
    names = [
        n for n in ("triton", "fa3", "fa4")
        if "full" in (c := capabilities(n, mla=view.use_mla_backend())).prefill_graphs
        and view.device.generation in c.generations
    ]  # fmt: skip
    return f"--prefill-attention-backend {' or '.join(names)}" if names else "leave it unset"


@register_post_process(fills=True)
def graph_sizes_default(view: View) -> dict[str, Any]:
    """Fills the sizes to record: batch sizes up to max_running_requests and prefill token counts up to the chunk size,
    both ends always included; up to 16 request slots in a full prefill graph; nothing where recording is disabled."""
    filled: dict[str, Any] = {}
    if view.is_default("cuda_graph_bs"):
        most = view.max_running_requests
        if view.cuda_graph_backend_decode in (None, "disabled"):
            filled["cuda_graph_bs"] = because((), "decode is not recorded")
        elif most is not None:
            filled["cuda_graph_bs"] = because(
                batch_ladder(most), f"a ladder up to max_running_requests ({most})"
            )
    if view.is_default("cuda_graph_prefill_tokens"):
        if view.cuda_graph_backend_prefill in (None, "disabled"):
            filled["cuda_graph_prefill_tokens"] = because((), "prefill is not recorded")
        else:
            most = _most_prefill_tokens(view)
            filled["cuda_graph_prefill_tokens"] = because(token_ladder(most), f"a ladder up to a step's {most} tokens")
    if view.is_default("cuda_graph_prefill_slots") and view.cuda_graph_backend_prefill == "full":
        most = min(16, view.max_running_requests or 16)
        filled["cuda_graph_prefill_slots"] = because(most, "few prompts start in the same step")
    return filled


def _most_prefill_tokens(view: View) -> int:
    chunk = view.chunked_prefill_size
    if chunk == -1:
        return min(view.context_length or _LONGEST_UNCUT, _LONGEST_UNCUT)
    return chunk or 1


@register_post_process(fills=True)
def lazy_capture_budget(view: View) -> dict[str, Any]:
    """Fills cuda_graph_lazy_mib where recordings are made at first use."""
    if view.cuda_graph_capture == "lazy" and view.is_default("cuda_graph_lazy_mib"):
        return {"cuda_graph_lazy_mib": because(512, "set aside at start, so that it never comes out of the KV cache")}
    return {}


@register_post_process
def lazy_budget_unused(view: View) -> dict[str, Any]:
    """Drops cuda_graph_lazy_mib where everything is recorded at start."""
    if view.cuda_graph_capture != "lazy" and view.asked("cuda_graph_lazy_mib") is not None:
        return {"cuda_graph_lazy_mib": because(None, "everything is recorded at start")}
    return {}


@register_post_process
def graph_sizes_clip(view: View) -> dict[str, Any]:
    """Adjusts sizes that were asked for: those above max_running_requests (or the chunk size) come down to it, and all
    go where that phase isn't recorded. (Lists are sorted and without repeats from the start.)"""
    changes: dict[str, Any] = {}
    limits = (
        ("cuda_graph_bs", DECODE, view.max_running_requests, "max_running_requests"),
        ("cuda_graph_prefill_tokens", PREFILL, _most_prefill_tokens(view), "a step's prefill tokens"),
    )
    for name, phase, most, what in limits:
        asked = view.asked(name)
        if asked is None:
            continue
        recorded = getattr(view, phase) not in (None, "disabled")
        if not asked and recorded:
            raise Conflict(
                name, phase, message=f"{name} is an empty list, so there is nothing to record.",
                remedy=f"Name a size, or set {phase} to disabled.",
            )  # fmt: skip
        if asked and not recorded:
            changes[name] = because((), f"{phase} is disabled")
        elif asked and most is not None and asked[-1] > most:
            changes[name] = because(tuple(sorted({min(size, most) for size in asked})), f"{what} is {most}")
    slots = view.asked("cuda_graph_prefill_slots")
    if slots is not None:
        if view.cuda_graph_backend_prefill != "full":
            changes["cuda_graph_prefill_slots"] = because(None, "only full prefill graphs have request slots")
        elif view.max_running_requests is not None and slots > view.max_running_requests:
            most = view.max_running_requests
            changes["cuda_graph_prefill_slots"] = because(most, f"max_running_requests is {most}")
    return changes
