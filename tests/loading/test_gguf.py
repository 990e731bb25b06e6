"""GGUF files made here from tiny models, against the same models in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from stenograph.config.facts import ModelFacts
from stenograph.errors import ModelLoadError
from stenograph.layers.linear import Build
from stenograph.layers.quantized import QuantizedTensor
from stenograph.loading.gguf_file import GGUFFile, _pair_halves
from stenograph.loading.loader import load_model
from stenograph.loading.source import open_model
from stenograph.models.registry import build_model
from tests.tiny import config_of, reference_model
from tests.whole_pass import logits_of

ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
DEQUANTISABLE = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_NL",
    "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "MXFP4", "NVFP4",
]  # fmt: skip


def names_of(architecture: str) -> dict[str, str]:
    """Hugging Face module -> GGUF name, from the format's own table."""
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
    }
    if architecture == "gemma3":
        table |= {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    return table


def write_gguf(path: Path, model: Any, architecture: str, *, types: Any = None, extra: Any = None) -> None:
    """`types(hf_name)` chooses each matrix's type; q and k of llama files are stored in pairs, Gemma's norms
    plus one."""
    config, kind = model.config, ARCH[architecture]
    writer = gguf.GGUFWriter(str(path), kind)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if architecture in ("mistral", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
    writer.add_eos_token_id(257)
    if extra is not None:
        extra(writer)
    table = names_of(architecture)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{table[rest]}.{leaf}"
        else:
            target = f"{table[stem]}.{leaf}"
        array = value.float().numpy()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = array.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if kind == "gemma3" and "norm" in stem:
            array = array + 1
        qtype = gguf.GGMLQuantizationType[(types(name) if types and array.ndim == 2 else None) or "F32"]
        if qtype.name == "F32":
            writer.add_tensor(target, array.astype(np.float32))
        elif qtype.name == "F16":
            writer.add_tensor(target, array.astype(np.float16))
        else:
            writer.add_tensor(target, gguf.quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    source = open_model(str(path))
    model = build_model(Build(torch.device("cpu"), dtype), source.facts, 256)
    with torch.inference_mode():
        load_model(source, model, progress=False)
    return model


@pytest.mark.parametrize("architecture", ARCH)
def test_same_logits_as_the_model_it_was_made_from(architecture: str, tmp_path: Path) -> None:
    changes = {"llama": {"attention_bias": True}, "gemma3": {"query_pre_attn_scalar": 32}}.get(architecture, {})
    model = reference_model(config_of(architecture, **changes))
    write_gguf(tmp_path / "tiny.gguf", model, architecture)
    ids = [(i * 13) % 320 for i in range(40)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(ours(tmp_path / "tiny.gguf"), ids), expected, atol=1e-4, rtol=0)


def test_mixed_types_within_a_fused_layer_equal_the_dequantised_model(tmp_path: Path) -> None:
    """q and k in one type, v in another, the head in a third."""
    model = reference_model(config_of("llama", hidden_size=256, intermediate_size=256, head_dim=64))
    types = {
        "q_proj": "Q4_1",
        "k_proj": "Q4_1",
        "v_proj": "Q8_0",
        "lm_head": "Q5_0",
        "down_proj": "F16",
        "embed_tokens": "Q8_0",
    }

    def choose(name: str) -> str | None:
        return types.get(name.split(".")[-2], "Q4_0")

    write_gguf(tmp_path / "mixed.gguf", model, "llama", types=choose)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 2:
                kind = gguf.GGMLQuantizationType[choose(name) or "F32"]
                array = value.numpy()  # q and k need no pairing here: blocks run along rows
                value.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(array, kind), kind).reshape(array.shape)))
    ids = [(i * 13) % 320 for i in range(20)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(ours(tmp_path / "mixed.gguf"), ids), expected, atol=1e-4, rtol=0)
    packed = ours(tmp_path / "mixed.gguf", torch.bfloat16)
    found = logits_of(packed, ids)
    assert packed.layers[0].mlp.gate_up_proj.packed is not None
    assert ((found - expected).norm() / expected.norm()).item() < 0.05


@pytest.mark.parametrize("qtype", DEQUANTISABLE)
def test_every_dequantisable_type_is_read(qtype: str) -> None:
    kind = gguf.GGMLQuantizationType[qtype]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, (4, 2 * size), dtype=np.uint8)  # small bytes keep half-precision scales finite
    tensor = QuantizedTensor(qtype, torch.from_numpy(raw), (4, 2 * block))
    expected = torch.from_numpy(gguf.dequantize(raw, kind)).view(4, -1)
    assert torch.equal(tensor.dequantize(torch.float32), expected)
    assert torch.equal(tensor.rows(1, 3).dequantize(torch.float32), expected[1:3])
    part = tensor.cols(block, 2 * block)
    assert part is not None and torch.equal(part.dequantize(torch.float32), expected[:, block:])
    if block > 1:
        assert tensor.cols(1, block) is None


def test_pairs_become_halves() -> None:
    assert _pair_halves(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_frequency_factors_scale_the_rotation(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model = reference_model(config_of("llama", rope_parameters=scaling))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(
        tmp_path / "l3.gguf",
        model,
        "llama",
        extra=lambda w: w.add_tensor("rope_freqs.weight", factors.astype(np.float32)),
    )
    ids = [(i * 13) % 320 for i in range(100)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(ours(tmp_path / "l3.gguf"), ids), expected, atol=1e-4, rtol=0)


class TestDamage:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, reference_model(config_of("llama")), "llama")
        return path

    @pytest.mark.parametrize("keep", [0, 3, 20, 60, 500, 0.5, 0.99])
    def test_truncated(self, file: Path, keep: float) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
        with pytest.raises(ModelLoadError, match=r"tiny.gguf is (damaged or truncated|no GGUF file)"):
            open_model(str(file))

    def test_not_a_gguf_file(self, file: Path) -> None:
        file.write_bytes(b"PK" + b"\0" * 100)
        with pytest.raises(ModelLoadError, match="no GGUF file"):
            open_model(str(file))

    def test_flipped_bytes_in_the_header_never_give_a_traceback(self, file: Path) -> None:
        data = bytearray(file.read_bytes())
        for position in range(4, 900, 7):
            broken = bytearray(data)
            broken[position] ^= 0xFF
            file.write_bytes(broken)
            try:
                assert isinstance(open_model(str(file)).facts, ModelFacts)
            except ModelLoadError:
                pass

    def test_unknown_architecture_lists_the_known(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "rwkv9")
        writer.add_block_count(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelLoadError, match="'rwkv9' is not supported. Supported: llama, qwen2"):
            open_model(str(tmp_path / "x.gguf"))


def test_opening_the_header_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_gguf(tmp_path / "tiny.gguf", reference_model(config_of("llama")), "llama")
    code = "import sys; from stenograph.loading.source import open_model; open_model(sys.argv[1]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "tiny.gguf")], check=False).returncode == 0
    assert GGUFFile(tmp_path / "tiny.gguf").eos_token_ids() == [257]
