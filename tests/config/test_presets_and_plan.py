"""Published shapes give published sizes; the plan adds up and its advice works."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from stenograph.config import plan as planning
from stenograph.config.options import DEFAULT_MODEL, EngineOptions
from stenograph.config.plan import plan_memory
from stenograph.config.presets import facts_without_weights, preset_facts, presets
from stenograph.config.resolve import resolve
from stenograph.config.support import THIS_VERSION
from stenograph.errors import ConfigError, ModelLoadError, OutOfMemoryError
from stenograph.memory import arithmetic
from tests.config.helpers import CPU, DEVICES, facts, settle

PUBLISHED = {
    "smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704, "gemma-3-1b": 999_885_952, "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert arithmetic.count_parameters(facts(name)).total == PUBLISHED[name]


def test_there_are_some_twenty_presets_found_by_name_or_id() -> None:
    assert len(presets()) >= 20
    assert preset_facts("Qwen/Qwen3-8B") == preset_facts("qwen3-8b") == facts_without_weights("QWEN3-8b")
    with pytest.raises(ConfigError, match=r"qwen3-8.*Did you mean qwen3-"):
        preset_facts("qwen3-8")
    assert facts_without_weights(DEFAULT_MODEL).quantization == "gguf"


def test_facts_come_from_a_directory_and_its_faults_are_told(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(presets()["qwen3-0.6b"]["config"]))
    assert facts_without_weights(str(tmp_path)) == preset_facts("qwen3-0.6b")
    for damaged in ("{", "[1]", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            facts_without_weights(str(tmp_path))
    for nowhere in ("a" * 5000, "~nobody-of-that-name/model", "a\0b"):
        assert facts_without_weights(nowhere) is None


def test_kv_bytes_a_token() -> None:
    assert arithmetic.kv_bytes_per_token(facts("llama-3.1-8b"), kv_dtype="bfloat16") == 2 * 32 * 8 * 128 * 2
    assert arithmetic.kv_bytes_per_token(facts("llama-3.1-8b"), kv_dtype="fp8_e4m3", tp_size=8) == 2 * 32 * 128
    assert arithmetic.kv_bytes_per_token(facts("llama-3.1-8b"), kv_dtype="bfloat16", tp_size=16) == 2 * 32 * 128 * 2
    assert arithmetic.kv_bytes_per_token(facts("deepseek-v3"), kv_dtype="bfloat16") == 61 * (512 + 64) * 2


def test_weights_shrink_with_ranks_and_quantisation() -> None:
    whole = arithmetic.weight_bytes(facts("llama-3.1-8b"), dtype="bfloat16")
    assert whole == 2 * PUBLISHED["llama-3.1-8b"]
    assert whole / 2 <= arithmetic.weight_bytes(facts("llama-3.1-8b"), dtype="bfloat16", tp_size=2) < whole * 0.51
    fp8 = arithmetic.weight_bytes(facts("deepseek-v3"), dtype="bfloat16", quantization="fp8")
    assert PUBLISHED["deepseek-v3"] < fp8 < PUBLISHED["deepseek-v3"] * 1.01


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-1b", "deepseek-v2-lite"])
@pytest.mark.parametrize("on", ["h200", "b200", "cpu"])
def test_a_plan_adds_up(name: str, on: str) -> None:
    resolved = settle(preset=name, on=on)
    plan = plan_memory(resolved)
    parts = plan.weight_bytes + plan.kv_bytes + plan.activation_bytes + plan.workspace_bytes + plan.graph_bytes_most
    assert parts + plan.left_bytes == plan.device_bytes
    assert parts <= plan.budget_bytes or on == "cpu"
    assert plan.kv_tokens == (plan.kv_pages - 1) * resolved.page_size
    assert plan.kv_bytes == plan.kv_pages * resolved.page_size * plan.kv_bytes_per_token
    assert plan.graph_bytes_least <= plan.graph_bytes_most
    for context, requests in plan.batches:
        pages = -(-context // resolved.page_size)
        assert requests * pages <= plan.kv_pages - 1
        assert requests == resolved.max_running_requests or (requests + 1) * pages > plan.kv_pages - 1
    assert f"{plan.kv_tokens:,} tokens fit" in planning.table(plan, resolved)
    assert planning.as_json(plan, resolved)["plan"]["kv_tokens"] == plan.kv_tokens


def test_the_kv_pool_is_as_large_as_is_of_use() -> None:
    most = {"page_size": 16, "max_running_requests": 4, "context_length": 100}
    assert arithmetic.wanted_pages(**most) == 4 * 7 + 1
    assert arithmetic.wanted_pages(**most, max_total_tokens=64) == 5
    assert arithmetic.wanted_pages(**most, max_total_tokens=1) == 2
    capped = plan_memory(settle(max_total_tokens=4096))
    assert capped.kv_tokens == 4096 and capped.left_bytes > plan_memory(settle()).left_bytes


def test_the_budget_is_what_is_left() -> None:
    room = {"total": 1000, "fraction": 0.5, "weights": 100, "elsewhere": 50}
    assert arithmetic.kv_budget_bytes(**room, on_gpu=True) == 350
    assert arithmetic.kv_budget_bytes(**room, on_gpu=False) == 400
    assert arithmetic.kv_budget_bytes(**room, on_gpu=False, tp_size=2) == 150


@pytest.mark.parametrize(("name", "on", "options"), [
    ("llama-3.3-70b", "h100", {}), ("deepseek-v3", "h200", {}),
    ("llama-3.1-8b", "rtx4090", {"mem_fraction_static": 0.9, "chunked_prefill_size": -1}),
    ("qwen3-32b", "l40s", {}), ("qwen3-0.6b", "h200", {"mem_fraction_static": 0.012}),
])  # fmt: skip
def test_advice_where_a_model_does_not_fit_is_right(name: str, on: str, options: dict) -> None:
    """A suggestion that counts something twice, or not at all, is worse than none."""
    resolved = settle(preset=name, on=on, support=THIS_VERSION, **options)
    with pytest.raises(OutOfMemoryError, match=r"does not fit.*GiB") as caught:
        plan_memory(resolved)
    found = re.search(r"--([a-z-]+) ([0-9.]+) would do", caught.value.remedy)
    assert found, caught.value.remedy
    name_, text = found[1].replace("-", "_"), found[2]
    value = float(text) if "." in text else int(text)
    better = resolve(
        EngineOptions(**{**resolved.options.set_values(), name_: value}), resolved.facts, resolved.device_facts
    )
    assert plan_memory(better).kv_tokens >= better.page_size


def test_a_model_too_large_for_anything_says_so() -> None:
    small = dataclasses.replace(CPU, memory_bytes=1 << 28)
    with pytest.raises(OutOfMemoryError, match="more memory"):
        plan_memory(settle(on=small))
    assert DEVICES["cpu"] is CPU
