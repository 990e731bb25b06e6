"""What is true of a model and of a device, as plain data. No torch in here.

`ModelFacts` comes from a config.json in the Hugging Face layout (a GGUF file's metadata is first put in that layout by
`loading.gguf`). Models, KV cache and settings all read it: it is the only home of a model's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.config.device import DeviceFacts
from stenograph.errors import ModelLoadError

__all__ = ["DeviceFacts", "MLAFacts", "MoEFacts", "ModelFacts", "RopeFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Rotary embedding of one kind of layer. `type` is default, linear, dynamic, llama3 or yarn; `raw` the rest."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_context: int | None = None
    partial: float = 1.0  # share of head_dim that is rotated
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAFacts:
    """Multi-head latent attention (DeepSeek): one compressed row of kv_lora_rank + rope_head_dim a token."""

    kv_lora_rank: int
    q_lora_rank: int | None
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFacts:
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int = 0
    first_dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The shape of a decoder-only language model. Sizes are in elements, `context_length` in tokens."""

    architecture: str  # "LlamaForCausalLM"
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    dtype: str = "bfloat16"  # of the checkpoint
    rms_norm_eps: float = 1e-6
    rope: RopeFacts = field(default_factory=RopeFacts)
    local_rope: RopeFacts | None = None  # of sliding-window layers, where it differs (Gemma 3)
    sliding_window: int | None = None  # tokens that a windowed layer sees, itself included
    windowed_layers: tuple[bool, ...] = ()  # one a layer
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    activation: str = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLAFacts | None = None
    moe: MoEFacts | None = None
    quantization: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the text part of config.json

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Reads a config.json (or its `text_config`). Raises `ModelLoadError` naming a missing or wrong field."""
        return _read(config)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def kv_bytes_per_token(self, dtype_bytes: int, tp_size: int = 1) -> int:
        """Bytes of KV cache that one token takes on one rank."""
        if self.mla:
            return self.num_layers * (self.mla.kv_lora_rank + self.mla.rope_head_dim) * dtype_bytes
        return self.num_layers * 2 * max(1, self.num_kv_heads // tp_size) * self.head_dim * dtype_bytes


def _read(top: Mapping[str, Any]) -> ModelFacts:
    config: dict[str, Any] = dict(top)
    if isinstance(config.get("text_config"), Mapping):  # a multi-modal wrapper: the language model is inside
        inner = dict(config["text_config"])
        for key in ("tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "bos_token_id"):
            if inner.get(key) is None and config.get(key) is not None:
                inner[key] = config[key]
        inner.setdefault("architectures", config.get("architectures"))
        config = inner

    def need(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelLoadError(f"config.json: {key} is {value!r}, not a positive integer.")
        return value

    architectures = config.get("architectures") or top.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures:
        raise ModelLoadError("config.json names no architecture.", remedy='It needs "architectures": ["..."].')
    architecture = str(architectures[0])
    model_type = str(config.get("model_type", ""))
    hidden, heads, layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
    gemma3 = model_type.startswith("gemma3")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key-value heads.")
    mla = None
    if config.get("kv_lora_rank"):
        mla = MLAFacts(
            kv_lora_rank=config["kv_lora_rank"],
            q_lora_rank=config.get("q_lora_rank"),
            nope_head_dim=config["qk_nope_head_dim"],
            rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
        )
    head_dim = config.get("head_dim") or (mla.nope_head_dim + mla.rope_head_dim if mla else hidden // heads)
    moe = None
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts")
    if experts:
        moe = MoEFacts(
            num_experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 1,
            intermediate_size=config.get("moe_intermediate_size") or config["intermediate_size"],
            shared_experts=config.get("n_shared_experts") or 0,
            first_dense_layers=config.get("first_k_dense_replace") or 0,
        )
    rope, local_rope = _read_rope(config, gemma3=gemma3)
    context = need("max_position_embeddings")
    if rope.original_context and rope.type in ("linear", "dynamic", "yarn") and rope.raw.get("_extends"):
        context = max(context, int(rope.original_context * rope.factor))
    window, windowed = _read_window(config, layers, model_type)
    eos = config.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (int(eos),))
    attention_bias = bool(config.get("attention_bias", False))
    qwen2 = model_type in ("qwen2", "qwen2_moe")
    tied = config.get("tie_word_embeddings")
    scalar = config.get("query_pre_attn_scalar")
    quant = config.get("quantization_config") or {}
    return ModelFacts(
        architecture=architecture,
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=need("vocab_size"),
        context_length=context,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        windowed_layers=windowed,
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type.startswith(("qwen3", "gemma3")),
        tie_embeddings=gemma3 if tied is None else bool(tied),
        activation=str(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
        attention_scale=float(scalar) ** -0.5 if scalar else None,
        attn_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        eos_token_ids=eos_ids,
        bos_token_id=config.get("bos_token_id"),
        mla=mla,
        moe=moe,
        quantization=quant.get("quant_method") if isinstance(quant, Mapping) else None,
        raw=config,
    )


def _read_rope(config: Mapping[str, Any], *, gemma3: bool) -> tuple[RopeFacts, RopeFacts | None]:
    """Both spellings: rope_scaling + rope_theta (older files) and rope_parameters (transformers 5), also per layer
    type."""
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(config.get("rope_theta") or (1_000_000.0 if gemma3 else 10000.0))
    partial = float(config.get("partial_rotary_factor") or 1.0)
    context = int(config.get("max_position_embeddings") or 0)

    def one(p: Mapping[str, Any], base: float) -> RopeFacts:
        kind = str(p.get("rope_type") or p.get("type") or "default")
        original = p.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return RopeFacts(
            theta=float(p.get("rope_theta") or base),
            type=kind,
            factor=float(p.get("factor") or 1.0),
            original_context=int(original or context) if kind != "default" else None,
            partial=float(p.get("partial_rotary_factor") or partial),
            raw={**p, "_extends": bool(p.get("original_max_position_embeddings"))},
        )

    if "full_attention" in params:
        local = params.get("sliding_attention")
        local_base = float(config.get("rope_local_base_freq") or 10000.0)
        return one(params["full_attention"] or {}, theta), one(local or {}, local_base)
    local_rope = RopeFacts(theta=float(config.get("rope_local_base_freq") or 10000.0)) if gemma3 else None
    return one(params, theta), local_rope


def _read_window(config: Mapping[str, Any], layers: int, model_type: str) -> tuple[int | None, tuple[bool, ...]]:
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return None, (False,) * layers
    if isinstance(types, (list, tuple)) and len(types) == layers:
        windowed = tuple(t == "sliding_attention" for t in types)
    elif model_type.startswith("gemma3"):
        pattern = int(config.get("sliding_window_pattern") or 6)
        windowed = tuple((i + 1) % pattern != 0 for i in range(layers))
    elif "max_window_layers" in config:  # Qwen: the upper layers are windowed
        if not config.get("use_sliding_window"):
            return None, (False,) * layers
        windowed = tuple(i >= int(config["max_window_layers"]) for i in range(layers))
    else:
        windowed = (True,) * layers
    return (int(window) if any(windowed) else None), windowed
