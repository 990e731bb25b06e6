"""Which attention backends run, and whether they can."""

from __future__ import annotations

from typing import Any

from stenograph.config.capabilities import Capabilities, capabilities
from stenograph.config.passes import Conflict, View, because, register_post_process

BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_PREFERENCE = {0: ("torch_native",), 90: ("fa3", "triton", "torch_native"), 100: ("fa4", "triton", "torch_native")}
_OTHER_GPUS = ("triton", "torch_native")


def problem(view: View, caps: Capabilities, *, page_size: int | None) -> tuple[str, str] | None:
    """(the setting that this backend can't go with, why), or None. `page_size` None: whatever suits it."""
    device, facts = view.device, view.facts
    topk = view.speculative_eagle_topk or 0
    if device.generation not in caps.generations:
        return "device", f"it does not run on {device.name}"
    if caps.max_head_dim is not None and not caps.mla and facts.head_dim > caps.max_head_dim:
        return "model", f"its heads have at most {caps.max_head_dim} elements, the model's {facts.head_dim}"
    if view.dtype not in caps.dtypes and view.dtype != "auto":
        return "dtype", f"it takes {_list(caps.dtypes)}, not {view.dtype}"
    if view.kv_cache_dtype not in caps.kv_dtypes and view.kv_cache_dtype != "auto":
        return "kv_cache_dtype", f"its KV cache is {_list(caps.kv_dtypes)}, not {view.kv_cache_dtype}"
    if topk > 1 and not caps.tree_masks:
        return "speculative_eagle_topk", "it has no tree masks, so top-k is 1"
    if page_size is not None and page_size not in caps.pages(topk):
        legal = ", ".join(map(str, caps.pages(topk)))
        return "page_size", f"its pages hold {legal} tokens{f' with top-k {topk}' if topk > 1 else ''}, not {page_size}"
    if (
        view.asked("cuda_graph_backend_prefill") == "full"
        and device.kind == "cuda"
        and "full" not in caps.prefill_graphs
    ):
        return "cuda_graph_backend_prefill", "it cannot be recorded in a full prefill graph"
    return None


def fa4_forces(view: View, *, page_of_128: bool) -> bool:
    """Whether FA4 on Blackwell, outside MLA, dictates the page size: 128, or with a draft tree (top-k > 1) 1."""
    return (
        not view.use_mla_backend()
        and view.is_sm100_supported()
        and ((view.speculative_eagle_topk or 0) <= 1) == page_of_128
    )


def backends_in_use(view: View) -> tuple[Capabilities, ...]:
    """Capabilities of the prefill and decode backends as resolved so far, without repeats."""
    names = dict.fromkeys((view.prefill_attention_backend, view.decode_attention_backend))
    return tuple(capabilities(name, mla=view.use_mla_backend()) for name in names if name is not None)


@register_post_process(fills=True)
def attention_default(view: View) -> dict[str, Any]:
    """Fills attention_backend. Where only the phase flags are set it is theirs (decode's if they differ). Else the
    first that is installed, built and able: on CPU torch_native; on sm90 fa3, then triton; on sm100 fa4, then triton;
    on other GPUs triton. MLA models get the backend's MLA form."""
    if not view.is_default("attention_backend"):
        return {}
    prefill, decode = view.asked("prefill_attention_backend"), view.asked("decode_attention_backend")
    if prefill or decode:  # their values as resolved so far: a pass may have adjusted them
        effective = view.decode_attention_backend if decode else view.prefill_attention_backend
        reason = (
            "both phases are set to it"
            if prefill == decode
            else "decode is set to it"
            if decode
            else "prefill is set to it"
        )
        return {"attention_backend": because(effective, reason)}
    mla = view.use_mla_backend()
    passed_over: list[str] = []
    choices = _PREFERENCE.get(view.device.generation, _OTHER_GPUS)
    for name in choices:
        caps = capabilities(name, mla=mla)
        why_not = _not_there(view, caps)
        if why_not is None:
            trouble = problem(view, caps, page_size=view.asked("page_size")) or _page_forced(view, caps)
            why_not = f"{trouble[0]}: {trouble[1]}" if trouble else None
        if why_not is None:
            return {"attention_backend": because(name, _reason(view, caps, passed_over))}
        passed_over.append(f"{name} ({why_not})")
    return {"attention_backend": because(choices[-1], f"none suits: {'; '.join(passed_over)}")}


@register_post_process(fills=True)
def phase_attention_backends(view: View) -> dict[str, Any]:
    """Fills the backend of each phase with attention_backend."""
    phases = ("prefill_attention_backend", "decode_attention_backend")
    return {n: because(view.attention_backend, "attention_backend") for n in phases if view.is_default(n)}


@register_post_process
def fa3_fp8_e5m2(view: View) -> dict[str, Any]:
    """Adjusts fa3 to triton where the KV cache is fp8_e5m2: FA3 takes fp8_e4m3 only."""
    if view.kv_cache_dtype != "fp8_e5m2":
        return {}
    named = [name for name in BACKEND_FIELDS if getattr(view, name) == "fa3"]
    return {name: because("triton", "FA3 takes an fp8_e4m3 KV cache, not fp8_e5m2") for name in named}


@register_post_process
def attention_check(view: View) -> dict[str, Any]:
    """Rejects a backend that can't do what is asked of it: the device, head size, number types, draft tree, page size
    or full prefill graph (as its Capabilities say); and prefill and decode backends that share no page size."""
    if view.page_size is None:
        return {}  # not filled yet
    for field in BACKEND_FIELDS[1:]:
        name = getattr(view, field)
        if name is None:
            continue
        caps = capabilities(name, mla=view.use_mla_backend())
        trouble = problem(view, caps, page_size=view.page_size)
        if trouble is None:
            continue
        setting, why = trouble
        if setting == "page_size" and view.is_default("page_size"):  # chosen by us to suit the other phase
            setting = "decode_attention_backend" if field.startswith("prefill") else "prefill_attention_backend"
        if setting == "cuda_graph_backend_prefill" and field.startswith("decode"):
            continue  # decode's backend takes no part in prefill graphs
        raise Conflict(field, setting, message=f"{caps.label}: {why}.", remedy=_remedy(view, setting))
    return {}


def _not_there(view: View, caps: Capabilities) -> str | None:
    if caps.library is not None and caps.library not in view.device.libraries:
        return f"its library {caps.library} is not installed"
    if caps.name not in view.support.attention:
        return "not in this version yet"
    return None


def _page_forced(view: View, caps: Capabilities) -> tuple[str, str] | None:
    asked = view.asked("page_size")
    if caps.name != "fa4" or asked is None:
        return None
    for size in (128, 1):
        if asked != size and fa4_forces(view, page_of_128=size == 128):
            return "page_size", f"it needs {size}-token pages here, {asked} is asked for"
    return None


def _reason(view: View, caps: Capabilities, passed_over: list[str]) -> str:
    generation = view.device.generation
    where = f"sm{generation}" if generation else "a CPU"
    form = ", in its MLA form" if caps.mla else ""
    if not passed_over:
        return f"first choice on {where}{form}"
    return f"first choice that can run on {where}{form}; passed over: {'; '.join(passed_over)}"


def _remedy(view: View, setting: str) -> str:
    able = []
    for name in ("torch_native", "triton", "flashinfer", "fa3", "fa4"):
        caps = capabilities(name, mla=view.use_mla_backend())
        page = view.page_size if setting == "page_size" else None
        if problem(view, caps, page_size=page) is None:
            able.append(name)
    if setting == "device" or not able:
        return f"Leave it unset, or use {' or '.join(able)}." if able else f"Change {setting}."
    return f"Change {setting}, or use {' or '.join(able)}."


def _list(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))
