"""What this version can run. One place: later work adds entries here, and the rules, checks and documents follow.

The rules choose among what is built when they choose by themselves, so an automatic value always runs. A value that a
user asks for resolves and is explained in any case (`steno explain` serves to plan ahead); `check_runnable` is what the
engine calls before it starts.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stenograph.errors import ConfigError

if TYPE_CHECKING:
    from stenograph.config.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Names of what is built. `features` holds prefix_cache, overlap_schedule, mla, moe where they are."""

    attention: frozenset[str]
    decode_graphs: frozenset[str]
    prefill_graphs: frozenset[str]
    speculation: frozenset[str]
    features: frozenset[str]
    quantizations: frozenset[str]
    kv_dtypes: frozenset[str]


THIS_VERSION: Final = Support(
    attention=frozenset({"torch_native", "triton"}),
    decode_graphs=frozenset({"full", "trace"}),
    prefill_graphs=frozenset(),
    speculation=frozenset(),
    features=frozenset(),
    quantizations=frozenset({"none", "gguf"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16"}),
)

EVERYTHING: Final = Support(  # all that the options can name: what the rules are tested with
    attention=frozenset({"torch_native", "triton", "flashinfer", "fa3", "fa4"}),
    decode_graphs=frozenset({"full", "piecewise", "trace"}),
    prefill_graphs=frozenset({"full", "piecewise", "trace"}),
    speculation=frozenset({"eagle", "eagle3", "ngram"}),
    features=frozenset({"prefix_cache", "overlap_schedule", "mla", "moe"}),
    quantizations=frozenset({"none", "gguf", "fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"}),
)


def check_runnable(resolved: Resolved, support: Support = THIS_VERSION) -> None:
    """Raises `ConfigError` naming a setting, or a kind of model, that this version resolves but cannot run yet."""
    runs: list[tuple[str, Any, AbstractSet[str | None]]] = [
        ("prefill_attention_backend", resolved.prefill_attention_backend, support.attention),
        ("decode_attention_backend", resolved.decode_attention_backend, support.attention),
        ("cuda_graph_backend_decode", resolved.cuda_graph_backend_decode, support.decode_graphs | {"disabled"}),
        ("cuda_graph_backend_prefill", resolved.cuda_graph_backend_prefill, support.prefill_graphs | {"disabled"}),
        ("kv_cache_dtype", resolved.kv_cache_dtype, support.kv_dtypes),
        ("speculative_algorithm", resolved.speculative_algorithm, support.speculation | {None}),
    ]
    for name, value, built in runs:
        if value not in built:
            instead = ", ".join(sorted(str(b) for b in built if b)) or "unset"
            raise ConfigError(
                f"{name} {value} cannot run in this version yet.", remedy=f"Leave it unset, or: {instead}."
            )
    for name in ("prefix_cache", "overlap_schedule"):
        if getattr(resolved, name) and name not in support.features:
            raise ConfigError(f"{name} cannot run in this version yet.", remedy="Leave it unset.")
    if resolved.quantization not in support.quantizations:
        raise ConfigError(
            f"{resolved.model} is quantised with {resolved.quantization}, which this version cannot run yet.",
            remedy="Use the model's unquantised checkpoint, or a GGUF file.",
        )
    for name, kind in (("mla", "multi-head latent attention"), ("moe", "mixture-of-experts layers")):
        if getattr(resolved.facts, name) is not None and name not in support.features:
            raise ConfigError(f"{resolved.model} has {kind}, which this version cannot run yet.")
