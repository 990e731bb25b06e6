"""What is true of a model and of a device, as plain data. No torch in here.

`ModelFacts` comes from a config.json in the Hugging Face layout (a GGUF file's metadata is first put in that layout by
`loading.gguf`). Models, KV cache and settings all read it: it is the only home of a model's shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.config.device import DeviceFacts
from stenograph.errors import ModelLoadError

__all__ = ["DeviceFacts", "MLAFacts", "MoEFacts", "ModelFacts", "RopeFacts"]

MOST_LAYERS = 10_000


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
        return int(_number(config, key, whole=True))

    def maybe(key: str) -> float | None:
        return None if config.get(key) is None else _number(config, key)

    architectures = config.get("architectures") or top.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures:
        raise ModelLoadError("config.json names no architecture.", remedy='It needs "architectures": ["..."].')
    architecture = str(architectures[0])
    model_type = str(config.get("model_type", ""))
    hidden, heads, layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
    if layers > MOST_LAYERS:  # of a damaged file: what is kept for each of them would fill the memory
        raise ModelLoadError(f"config.json: num_hidden_layers is {layers}; at most {MOST_LAYERS}.")
    gemma3 = model_type.startswith("gemma3")
    kv_heads = int(_number(config, "num_key_value_heads", heads, whole=True))
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key-value heads.")
    mla = None
    if config.get("kv_lora_rank"):
        mla = MLAFacts(
            kv_lora_rank=need("kv_lora_rank"),
            q_lora_rank=need("q_lora_rank") if config.get("q_lora_rank") else None,
            nope_head_dim=need("qk_nope_head_dim"),
            rope_head_dim=need("qk_rope_head_dim"),
            v_head_dim=need("v_head_dim"),
        )
    usual = mla.nope_head_dim + mla.rope_head_dim if mla else hidden // heads
    head_dim = int(_number(config, "head_dim", usual, whole=True))
    moe = None
    experts = next((k for k in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(k)), None)
    if experts:
        width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
        moe = MoEFacts(
            num_experts=need(experts),
            experts_per_token=int(_number(config, "num_experts_per_tok", 1, whole=True)),
            intermediate_size=need(width),
            shared_experts=need("n_shared_experts") if config.get("n_shared_experts") else 0,
            first_dense_layers=need("first_k_dense_replace") if config.get("first_k_dense_replace") else 0,
        )
    context = need("max_position_embeddings")
    rope, local_rope = _read_rope(config, context, gemma3=gemma3)
    if rope.original_context and rope.type in ("linear", "dynamic", "yarn") and rope.raw.get("_extends"):
        context = max(context, int(rope.original_context * rope.factor))
    window, windowed = _read_window(config, layers, model_type)
    attention_bias = bool(config.get("attention_bias", False))
    qwen2 = model_type in ("qwen2", "qwen2_moe")
    tied = config.get("tie_word_embeddings")
    scalar = maybe("query_pre_attn_scalar")
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
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
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
        attention_scale=scalar**-0.5 if scalar else None,
        attn_softcap=maybe("attn_logit_softcapping"),
        logit_softcap=maybe("final_logit_softcapping"),
        eos_token_ids=token_ids(config.get("eos_token_id"), "config.json: eos_token_id"),
        bos_token_id=config.get("bos_token_id"),
        mla=mla,
        moe=moe,
        quantization=quant.get("quant_method") if isinstance(quant, Mapping) else None,
        raw=config,
    )


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Of one id, a list of ids or null. Raises `ModelLoadError` for anything else."""
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelLoadError(f"{where} is {value!r}, neither a token id nor a list of them.")
    return tuple(ids)


def _number(fields: Mapping[str, Any], key: str, default: float | None = None, *, whole: bool = False) -> float:
    """A field above zero; absent or null it is `default`. Raises `ModelLoadError` naming the field."""
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int if whole else int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ModelLoadError(f"config.json: {key} is {value!r}, not a positive {'integer' if whole else 'number'}.")


def _read_rope(config: Mapping[str, Any], context: int, *, gemma3: bool) -> tuple[RopeFacts, RopeFacts | None]:
    """Both spellings: rope_scaling + rope_theta (older files) and rope_parameters (transformers 5), also per layer
    type."""
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"config.json: the RoPE parameters are {params!r}, no JSON object.")
    theta = _number(config, "rope_theta", 1_000_000.0 if gemma3 else 10000.0)
    local_theta = _number(config, "rope_local_base_freq", 10000.0)
    partial = _number(config, "partial_rotary_factor", 1.0)

    def one(p: Any, base: float) -> RopeFacts:
        if not isinstance(p, Mapping):
            raise ModelLoadError(f"config.json: the RoPE parameters hold {p!r} where a JSON object belongs.")
        kind = str(p.get("rope_type") or p.get("type") or "default")
        key = "original_max_position_embeddings"
        given = p if p.get(key) is not None else config
        share = _number(p, "partial_rotary_factor", partial)
        if share > 1:
            raise ModelLoadError(f"config.json: partial_rotary_factor is {share}, more than all of a head.")
        # Linear scaling without the original length: by convention config.json then holds the unscaled one, but for
        # Gemma 3, whose files hold the scaled one.
        unscaled = kind == "linear" and not gemma3 and given.get(key) is None
        return RopeFacts(
            theta=_number(p, "rope_theta", base),
            type=kind,
            factor=_number(p, "factor", 1.0),
            original_context=int(_number(given, key, context, whole=True)) if kind != "default" else None,
            partial=share,
            raw={**p, "_extends": p.get(key) is not None or unscaled},
        )

    if "full_attention" in params:
        return one(params["full_attention"] or {}, theta), one(params.get("sliding_attention") or {}, local_theta)
    return one(params, theta), RopeFacts(theta=local_theta) if gemma3 else None


def _read_window(config: Mapping[str, Any], layers: int, model_type: str) -> tuple[int | None, tuple[bool, ...]]:
    window = config.get("sliding_window")
    types = config.get("layer_types")
    by_switch = model_type.startswith("qwen")  # whose windows are off unless switched on
    if not window or not config.get("use_sliding_window", not by_switch):
        return None, (False,) * layers
    size = int(_number(config, "sliding_window", whole=True))
    if types is not None:
        if not isinstance(types, (list, tuple)) or len(types) != layers:
            raise ModelLoadError(f"config.json: layer_types is no list of {layers} kinds, one a layer.")
        windowed = tuple(t == "sliding_attention" for t in types)
    elif model_type.startswith("gemma3"):
        pattern = int(_number(config, "sliding_window_pattern", 6, whole=True))
        windowed = tuple((i + 1) % pattern != 0 for i in range(layers))
    elif by_switch:  # the upper layers are windowed
        first = config.get("max_window_layers")
        first = 28 if first is None else first  # as transformers has it where config.json is silent
        if not isinstance(first, int):
            raise ModelLoadError(f"config.json: max_window_layers is {first!r}, not an integer.")
        windowed = tuple(i >= first for i in range(layers))
    else:
        windowed = (True,) * layers
    return (size if any(windowed) else None), windowed
