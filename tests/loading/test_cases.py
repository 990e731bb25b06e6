"""Checkpoints that users had trouble with: numbers of the wrong kind, unusual files, lengths that scaling changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stenograph.config.facts import ModelFacts
from stenograph.errors import ModelLoadError
from stenograph.loading.source import open_model
from tests.tiny import config_of, save_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A configuration without weights: opened with dummy ones."""
    config_of("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def facts_of(directory: Path, **changes: Any) -> ModelFacts:
    config = json.loads((directory / "config.json").read_text())
    config.setdefault("architectures", ["LlamaForCausalLM"])
    config |= changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return open_model(str(directory), load_format="dummy").facts


WRONG = ["x", [], [1, 2], {"a": 1}, True, -1, float("nan"), float("inf")]


class TestConfiguration:
    @pytest.mark.parametrize("value", WRONG)
    @pytest.mark.parametrize(
        "field",
        ["hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"],
    )
    def test_a_number_of_the_wrong_kind_is_named(self, directory: Path, field: str, value: Any) -> None:
        with pytest.raises(ModelLoadError, match=rf"config.json: {field} is .*, not a positive"):
            facts_of(directory, rope_parameters=None, **{field: value})

    @pytest.mark.parametrize("value", ["x", {"a": 1}, True, [1, "b"], 1.5])
    def test_end_ids_of_the_wrong_kind_are_named(self, directory: Path, value: Any) -> None:
        with pytest.raises(ModelLoadError, match="eos_token_id is .*, neither a token id nor a list"):
            facts_of(directory, eos_token_id=value)

    def test_end_ids_of_the_wrong_kind_in_the_generation_configuration(self, directory: Path) -> None:
        (directory / "generation_config.json").write_text('{"eos_token_id": "two"}')
        with pytest.raises(ModelLoadError, match="generation_config.json: eos_token_id is 'two'"):
            facts_of(directory)

    @pytest.mark.parametrize(
        "value", ["x", [1], {"rope_type": "yarn", "factor": "x"}, {"rope_type": "linear", "factor": 0}]
    )
    def test_rope_parameters_of_the_wrong_kind_are_told(self, directory: Path, value: Any) -> None:
        with pytest.raises(ModelLoadError, match="RoPE parameters|factor is"):
            facts_of(directory, rope_parameters=None, rope_scaling=value)

    def test_a_list_of_layer_kinds_that_is_too_short(self, directory: Path) -> None:
        with pytest.raises(ModelLoadError, match="layer_types is no list of 2 kinds"):
            facts_of(directory, sliding_window=8, layer_types=["full_attention"])


class TestLengths:
    @pytest.mark.parametrize("spelling", ["type", "rope_type"])
    @pytest.mark.parametrize(
        "kind,more,context",
        [
            ("linear", {}, 2048),
            ("linear", {"original_max_position_embeddings": 512}, 2048),
            ("dynamic", {}, 512),  # plain rotation, as far as it goes
            ("yarn", {"original_max_position_embeddings": 512}, 2048),
            ("yarn", {"original_max_position_embeddings": 128}, 512),
            ("llama3", {"original_max_position_embeddings": 128}, 512),
        ],
    )
    def test_the_context_is_the_scaled_one(
        self, directory: Path, spelling: str, kind: str, more: dict[str, int], context: int
    ) -> None:
        scaling = {spelling: kind, "factor": 4.0, **more}
        assert facts_of(directory, rope_parameters=None, rope_scaling=scaling).context_length == context

    def test_gemma_3_gives_the_scaled_length_itself(self, directory: Path) -> None:
        changes = {"model_type": "gemma3_text", "rope_parameters": None}
        facts = facts_of(directory, rope_scaling={"rope_type": "linear", "factor": 8.0}, **changes)
        assert (facts.context_length, facts.rope.factor) == (512, 8.0)

    @pytest.mark.parametrize(
        "changes,windowed",
        [
            ({"sliding_window": 8, "max_window_layers": 1}, (False, False)),  # off unless switched on
            ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": False}, (False, False)),
            ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (False, True)),
            ({"sliding_window": 8, "max_window_layers": 0, "use_sliding_window": True}, (True, True)),
            ({"sliding_window": 8, "use_sliding_window": True}, (False, False)),
            ({"sliding_window": None, "use_sliding_window": True}, (False, False)),
        ],
    )
    def test_which_layers_of_qwen_are_windowed(
        self, directory: Path, changes: dict[str, Any], windowed: tuple[bool, ...]
    ) -> None:
        facts = facts_of(directory, model_type="qwen2", layer_types=None, **changes)
        assert facts.windowed_layers == windowed
        assert facts.sliding_window == (8 if any(windowed) else None)


class TestNames:
    @pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-that-name/model", "nul\0byte", "", "one-word", "a/b/c"])
    def test_names_that_lead_nowhere(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelLoadError, match="Name a directory"):
            open_model(name)


def test_a_damaged_list_of_added_tokens_is_told(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "added_tokens_decoder": [1]}')
    with pytest.raises(ModelLoadError, match="tokenizer_config.json or tokenizer.json"):
        open_model(str(directory), load_format="dummy")
