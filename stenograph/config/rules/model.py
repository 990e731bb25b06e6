"""Device, number types, quantisation and context length."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from stenograph.config.options import QUANTIZATIONS
from stenograph.config.passes import Conflict, View, because, register_post_process


@register_post_process(fills=True)
def device_kind(view: View) -> dict[str, Any]:
    """Fills device with the kind of the device that was found or named; another kind than the asked one is rejected."""
    found, asked = view.device, view.asked("device")
    if asked is None:
        return {"device": because(found.kind, f"the device is {found.name}")}
    if asked != found.kind:
        raise Conflict(
            "device",
            message=f"{asked} was asked for, and the device is {found.name} ({found.kind}).",
            remedy="Leave device unset.",
        )
    return {}


@register_post_process(fills=True)
def served_name(view: View) -> dict[str, Any]:
    """Fills the name that API clients use with the model's own; of a path, its last part."""
    if not view.is_default("served_model_name"):
        return {}
    name = str(view.model)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith((".gguf", "/")):
        return {"served_model_name": because(PurePath(name).name.removesuffix(".gguf") or name, "the path's last part")}
    return {"served_model_name": because(view.model, "the model's own name")}


@register_post_process(fills=True)
def cpu_threads(view: View) -> dict[str, Any]:
    """Fills the engine's CPU threads: every core that the process may use; a few where a GPU does the work."""
    if not view.is_default("threads"):
        return {}
    cores = view.device.cpu_count
    if view.device.kind == "cpu":
        share = max(1, cores // view.tp_size)
        return {
            "threads": because(share, f"{cores} cores" + (f" for {view.tp_size} ranks" if view.tp_size > 1 else ""))
        }
    return {"threads": because(min(4, cores), "the GPU does the work")}


@register_post_process(fills=True)
def dtype_default(view: View) -> dict[str, Any]:
    """Fills dtype. GPU: the checkpoint's, with float32 as bfloat16; CPU: bfloat16 where it has instructions for it."""
    if not view.is_default("dtype"):
        return {}
    if view.device.kind == "cpu":
        if view.device.bfloat16:
            return {
                "dtype": because("bfloat16", "this CPU has bfloat16 instructions: half the bytes of float32 to move")
            }
        return {
            "dtype": because("float32", "this CPU has no bfloat16 instructions, which makes float32 the faster one")
        }
    stored = view.facts.dtype
    if stored not in ("bfloat16", "float16"):
        stored, reason = "bfloat16", f"the checkpoint's {stored} would take twice the memory"
    else:
        reason = "the checkpoint's"
    if stored == "bfloat16" and not view.device.bfloat16:
        return {"dtype": because("float16", f"{view.device.name} has no bfloat16")}
    return {"dtype": because(stored, reason)}


@register_post_process
def float16_on_cpu(view: View) -> dict[str, Any]:
    """Adjusts float16 on a CPU to float32: CPUs compute float16 slowly, and its range is small."""
    if view.device.kind == "cpu" and view.dtype == "float16":
        return {
            "dtype": because("float32", "CPUs compute float16 slowly and its range is small; float32 holds all of it")
        }
    return {}


@register_post_process(fills=True)
def quantization_default(view: View) -> dict[str, Any]:
    """Fills quantization with the checkpoint's method, or none; a GGUF file's is gguf, dummy weights have none."""
    if not view.is_default("quantization"):
        return {}
    if view.load_format == "dummy":
        return {"quantization": because("none", "dummy weights are not quantised")}
    if _is_gguf(view):
        return {"quantization": because("gguf", "the weights are a GGUF file")}
    method = view.facts.quantization
    if method is None:
        return {"quantization": because("none", "the checkpoint is not quantised")}
    if method not in QUANTIZATIONS:
        raise Conflict(
            "quantization", "model", message=f"the checkpoint is quantised with {method}, which is not known.",
            remedy=f"Known are {', '.join(QUANTIZATIONS)}.",
        )  # fmt: skip
    return {"quantization": because(method, "the checkpoint's")}


def _is_gguf(view: View) -> bool:
    return view.load_format == "gguf" or str(view.model).endswith(".gguf")


@register_post_process
def quantization_check(view: View) -> dict[str, Any]:
    """Rejects a quantisation that the checkpoint doesn't have (nothing is quantised on the fly) or the device can't
    run."""
    method = view.quantization
    if method is None:
        return {}
    stored = view.facts.quantization or "none"
    fits = (
        method == stored
        or (method == "gguf" and (stored == "none" or _is_gguf(view)))  # its facts may be those of the plain model
        or (method == "none" and view.load_format == "dummy")
    )
    if not fits and not view.is_default("quantization"):
        raise Conflict(
            "quantization", "model", message=f"{method} asked for, and the checkpoint has {stored}.",
            remedy=f"Leave quantization unset, or choose a checkpoint in {method}.",
        )  # fmt: skip
    generation = view.device.generation
    if view.device.kind == "cpu" and method not in ("none", "gguf"):
        raise Conflict(
            "quantization", "device", message=f"{method} weights need a GPU.",
            remedy="Use a GGUF file or an unquantised checkpoint on a CPU.",
        )  # fmt: skip
    if method == "fp8" and 0 < generation < 89:
        raise Conflict(
            "quantization", "device", message=f"fp8 weights need a GPU of sm89 or later, not sm{generation}.",
            remedy="Choose another GPU, or a bfloat16 checkpoint.",
        )  # fmt: skip
    return {}


@register_post_process(fills=True)
def context_length_default(view: View) -> dict[str, Any]:
    """Fills the context length with the model's; a longer one is rejected."""
    longest = view.facts.context_length
    if view.is_default("context_length"):
        return {"context_length": because(longest, "the model's")}
    if view.context_length > longest:
        raise Conflict(
            "context_length", "model", message=f"{view.context_length} tokens, and the model was made for {longest}.",
            remedy=f"Set it to {longest} or less, or add RoPE scaling to the model's config.json.",
        )  # fmt: skip
    return {}


@register_post_process(fills=True)
def kv_dtype_default(view: View) -> dict[str, Any]:
    """Fills the KV cache's number type with that of the activations."""
    if not view.is_default("kv_cache_dtype"):
        return {}
    return {"kv_cache_dtype": because(view.dtype, "as the activations (dtype)")}
