"""GGUF files: metadata, a configuration in the Hugging Face layout, and weights under Hugging Face names.

The header is read here rather than with the gguf package's reader, which takes two seconds for a vocabulary of 49,000
tokens; the quantised formats themselves are that package's (see `layers.quantized`).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stenograph.errors import ModelLoadError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Types that are no blocks -> torch's names."""
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>")
"""Control tokens that end a turn whatever the metadata's single end id says."""
CONTROL = 3  # tokenizer.ggml.token_type
KINDS: dict[str, type] = {
    "general.architecture": str,
    "general.alignment": int,
    "split.count": int,
    "tokenizer.chat_template": str,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.token_type": list,
    "tokenizer.ggml.scores": list,
    "tokenizer.ggml.merges": list,
}
"""What is read as it is must be of its kind; so must "*_token_id", an integer."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first
    qtype: str
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open file. Raises `ModelLoadError` for anything that isn't a whole, little-endian GGUF of version 2 or 3."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise self._damaged(f"it has only {size} bytes")
            # A private map: torch wants writable memory, and nothing written would reach the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, MemoryError, OverflowError, IndexError, RecursionError) as error:
            raise self._damaged("its header cannot be read") from error

    def _damaged(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path.name} is damaged or truncated: {why}.", remedy="Fetch the file again.")

    # -- header

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._map[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path.name} is no GGUF file.", remedy="It should begin with the letters GGUF.")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path.name} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        if num_tensors > 1_000_000 or num_values > 1_000_000:
            raise self._damaged("it claims more than a million tensors or values")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_values)}
        self._check_kinds(metadata)
        found = []
        for _ in range(num_tensors):
            name, dimensions = self._string(), self._scalar("I")
            if dimensions > 8:
                raise self._damaged(f"{name} has {dimensions} dimensions")
            shape = tuple(reversed([self._scalar("Q") for _ in range(dimensions)]))
            found.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            tensors[name] = self._tensor_info(name, shape, kind, start + offset)
        return metadata, tensors

    def _check_kinds(self, metadata: dict[str, Any]) -> None:
        for key, value in metadata.items():
            kind = int if key.endswith("_token_id") else KINDS.get(key)
            if kind is not None and not isinstance(value, kind):
                raise self._damaged(f"{key} is of the wrong kind")
        if metadata.get("general.alignment", 32) <= 0:
            raise self._damaged("its alignment is no positive number")
        if metadata.get("split.count", 1) > 1:
            raise ModelLoadError(
                f"{self.path.name} is one of {metadata['split.count']} parts of a model.",
                remedy="Merge them first: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
            )

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        import gguf

        try:
            qtype = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ModelLoadError(
                f"{self.path.name}: {name} has the unknown type {kind}.", remedy="A newer gguf package may know it."
            ) from None
        if qtype.name not in DENSE and not _can_dequantise(qtype):
            raise ModelLoadError(
                f"{self.path.name}: {name} is of the type {qtype.name}, which the gguf package does not dequantise.",
                remedy="Take a file of another quantisation.",
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        count = 1
        for extent in shape:
            count *= extent
        if shape and shape[-1] % block:
            raise self._damaged(f"{name}'s rows are no whole number of {qtype.name} blocks")
        num_bytes = count // block * block_bytes
        if offset + num_bytes > len(self._map):
            missing = offset + num_bytes - len(self._map)
            raise self._damaged(f"{name} ends {missing} bytes beyond the end of the file")
        return TensorInfo(name, shape, qtype.name, offset, num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._map[self._at : self._at + length]
        if len(raw) < length:
            raise self._damaged("a text in its header ends beyond the end of the file")
        self._at += length
        return raw.decode("utf-8", errors="surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._damaged(f"a value has the unknown type {kind}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in SCALARS:
            code = f"<{count}{SCALARS[inner]}"
            values = list(struct.unpack_from(code, self._map, self._at))
            self._at += struct.calcsize(code)
            return values
        return [self._value(inner) for _ in range(count)]

    # -- the model's configuration

    def _number(self, key: str, default: float | None = None) -> Any:
        """A value above zero of the architecture's own, "llama.block_count" for "block_count"."""
        key = f"{self.metadata['general.architecture']}.{key}"
        found = self.metadata.get(key, default)
        if found is None:
            raise ModelLoadError(f"{self.path.name} lacks the value {key}.")
        if isinstance(found, list) and found:
            if any(other != found[0] for other in found):
                raise ModelLoadError(f"{self.path.name}: {key} differs from layer to layer, which is not supported.")
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise self._damaged(f"{key} is {found!r}")
        return found

    def config(self) -> dict[str, Any]:
        """In the Hugging Face layout. Raises `ModelLoadError` for an unknown architecture or a missing value."""
        kind = str(self.metadata.get("general.architecture", ""))
        if kind not in ARCHITECTURES:
            raise ModelLoadError(
                f"The GGUF architecture {kind!r} is not supported.", remedy=f"Supported: {', '.join(ARCHITECTURES)}."
            )

        value = self._number
        heads, hidden = value("attention.head_count"), value("embedding_length")
        head_dim = value("attention.key_length", hidden // heads)
        experts = self.metadata.get(f"{kind}.expert_count")
        if experts:
            raise ModelLoadError(
                f"{self.path.name} is a mixture of {experts} experts, which is not supported.",
                remedy="Take a dense model.",
            )
        if "token_embd.weight" not in self.tensors:
            raise ModelLoadError(f"{self.path.name} holds no token_embd.weight.")
        if value("block_count") > len(self.tensors):
            raise self._damaged(f"it has {len(self.tensors)} tensors for {value('block_count')} layers")
        architecture, model_type = ARCHITECTURES[kind]
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": hidden,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": self.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": value("context_length"),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": value("rope.freq_base", 10000.0),
            "partial_rotary_factor": value("rope.dimension_count", head_dim) / head_dim,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensors,
            "eos_token_id": self.eos_token_ids(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "torch_dtype": "bfloat16",
        }
        scaling = self._rope_scaling(kind, int(value("rope.dimension_count", head_dim)))
        if scaling:
            config["rope_scaling"] = scaling
        window = self.metadata.get(f"{kind}.attention.sliding_window")
        if kind == "gemma3":
            layers, large = config["num_hidden_layers"], 62  # the 27B model scales by hidden size over heads
            config["query_pre_attn_scalar"] = hidden // heads if layers == large else head_dim
            config["hidden_activation"] = "gelu_pytorch_tanh"
            config["rope_theta"] = value("rope.freq_base", 1_000_000.0)
            config["final_logit_softcapping"] = self.metadata.get(f"{kind}.final_logit_softcapping")
            config["rope_local_base_freq"] = value("rope.freq_base_swa", 10_000.0)
            pattern = self.metadata.get(f"{kind}.attention.sliding_window_pattern", 6)
            if isinstance(pattern, list):  # one flag a layer
                config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in pattern]
            else:
                config["sliding_window_pattern"] = pattern
        if window:
            config["sliding_window"] = window
        return config

    def _rope_scaling(self, kind: str, rotated: int) -> dict[str, Any]:
        scaling: dict[str, Any] = {}
        method = self.metadata.get(f"{kind}.rope.scaling.type")
        if method and method != "none":
            scaling["rope_type"] = method
            factor = scaling["factor"] = self._number("rope.scaling.factor", 1.0)
            original = self.metadata.get(f"{kind}.rope.scaling.original_context_length")
            if original is None and method == "linear":  # the context in these files is the stretched one
                original = max(1, int(self._number("context_length") / factor))
            if original:
                scaling["original_max_position_embeddings"] = original
        if "rope_freqs.weight" in self.tensors:  # Llama 3's scaling, as a divisor for each frequency
            factors = self.tensor("rope_freqs.weight")
            if self.tensors["rope_freqs.weight"].shape != (rotated // 2,):
                raise self._damaged("rope_freqs.weight is of the wrong size")
            scaling = {"rope_type": "default", "freq_factors": factors.tolist()}
        return scaling

    def eos_token_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.metadata[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in self.metadata]
        tokens, types = (
            self.metadata.get("tokenizer.ggml.tokens") or [],
            self.metadata.get("tokenizer.ggml.token_type") or [],
        )
        control = {tokens[i]: i for i, kind in enumerate(types) if kind == CONTROL and i < len(tokens)}
        ids += [control[text] for text in END_TOKENS if text in control]
        return sorted({int(i) for i in ids})

    # -- weights

    def tensor(self, name: str) -> Any:
        """A torch tensor over the file's memory, or a `QuantizedTensor`."""
        import torch

        from stenograph.layers.quantized import QuantizedTensor

        info = self.tensors[name]
        if info.num_bytes == 0:
            raise self._damaged(f"{name} is empty")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        if info.qtype in DENSE:
            return raw.view(getattr(torch, DENSE[info.qtype])).view(info.shape)
        cols = info.shape[-1]
        rows = 1
        for extent in info.shape[:-1]:
            rows *= extent
        quantized = QuantizedTensor(info.qtype, raw.view(rows, -1), (rows, cols))
        return quantized if len(info.shape) == 2 else quantized.dequantize(torch.float32).view(info.shape)

    def weights(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, value); rows of rotated heads back in Hugging Face's order."""
        kind = self.metadata["general.architecture"]
        for name in self.tensors:
            if name == "rope_freqs.weight":
                continue
            value = self.tensor(name)
            if kind == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
                key = "head_count" if ".attn_q." in name else "head_count_kv"
                heads = self._number(f"attention.{key}", self._number("attention.head_count"))
                if value.shape[0] % (2 * heads):
                    raise self._damaged(f"{name} has {value.shape[0]} rows for {heads} heads")
                value = _pair_halves(value, heads)
            elif kind == "gemma3" and name.endswith("norm.weight"):
                value = value - 1  # the file holds 1 + weight, Hugging Face's layout the weight
            yield self._hf_name(kind, name), value

    @staticmethod
    def _hf_name(kind: str, name: str) -> str:
        layer = re.fullmatch(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)", name)
        if layer:
            names = LAYER_NAMES | GEMMA_LAYER_NAMES if kind == "gemma3" else LAYER_NAMES
            return f"model.layers.{layer[1]}.{names.get(layer[2], layer[2])}.{layer[3]}"
        stem, _, leaf = name.rpartition(".")
        return f"{TOP_NAMES.get(stem, stem)}.{leaf}"


@cache
def _can_dequantise(qtype: Any) -> bool:
    import gguf
    import numpy as np

    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8), qtype)
    except NotImplementedError:
        return False
    return True


def _pair_halves(value: Any, heads: int) -> Any:
    """Llama-type files hold each head's rows as pairs (0, half, 1, half + 1, ...); Hugging Face's as two halves."""
    import torch

    from stenograph.layers.quantized import QuantizedTensor

    rows = value.shape[0]
    order = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()
    if isinstance(value, QuantizedTensor):
        return QuantizedTensor(value.qtype, value.data[order], value.shape)
    return value[order]
