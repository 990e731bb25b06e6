"""The same wish, spelled in different ways, resolves alike."""

from __future__ import annotations

from typing import Any

import pytest

from stenograph.config.options import EngineOptions
from stenograph.config.resolve import resolve
from stenograph.config.sources import gather
from stenograph.config.support import EVERYTHING
from tests.config.helpers import DEVICES, facts, settle

EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model_path": "draft"}


@pytest.mark.parametrize("on", sorted(DEVICES))
@pytest.mark.parametrize("preset", ["qwen3-8b", "deepseek-v2-lite"])
@pytest.mark.parametrize("topk", [None, 1, 4])
def test_eagle_filled_and_eagle_spelled_out(on: str, preset: str, topk: int | None) -> None:
    given: dict[str, Any] = dict(EAGLE) if topk is None else {**EAGLE, "speculative_eagle_topk": topk}
    filled = settle(preset=preset, on=on, **given)
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    spelled = settle(preset=preset, on=on, **EAGLE, **{name: getattr(filled, name) for name in names})
    assert spelled == filled and spelled.settings()["speculative_eagle_topk"].source == "python"


@pytest.mark.parametrize("backend", ["fa4", "fa3", "triton", "flashinfer"])
@pytest.mark.parametrize("on", ["h200", "b200"])
def test_the_combined_flag_and_the_phase_flags(backend: str, on: str) -> None:
    if backend == "fa3" and on == "b200":
        on = "h100"
    combined = settle(on=on, attention_backend=backend)
    phases = settle(on=on, prefill_attention_backend=backend, decode_attention_backend=backend)
    prefill_alone = settle(on=on, prefill_attention_backend=backend)
    decode_alone = settle(on=on, decode_attention_backend=backend)
    assert combined == phases == prefill_alone == decode_alone
    if backend == "fa4" and on == "b200":
        assert {r.settings()["page_size"].source for r in (combined, phases, prefill_alone)} == {"fa4_page_constraint"}


def test_flag_environment_file_and_python(tmp_path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("attention_backend: fa4\npage-size: 16\nmax_running_requests: 12\nprefix_cache: false\n")
    texts = {"attention_backend": "fa4", "page_size": "16", "max_running_requests": "12"}
    variables = {f"STENOGRAPH_{name.upper()}": text for name, text in texts.items()}
    spelled = {
        "flag": gather({**texts, "prefix_cache": False}, environment={}),
        "env": gather({}, environment={**variables, "STENOGRAPH_PREFIX_CACHE": "no"}),
        "file": gather({}, config=str(file), environment={}),
        "python": EngineOptions.from_python(
            attention_backend="fa4", page_size=16, max_running_requests=12, prefix_cache=False
        ),
    }
    resolved = {
        name: resolve(options, facts("qwen3-8b"), DEVICES["b200"], support=EVERYTHING)
        for name, options in spelled.items()
    }
    assert all(r == resolved["python"] for r in resolved.values())
    for name, r in resolved.items():
        settings = r.settings()
        assert settings["attention_backend"].source == name
        assert [step.source for step in settings["page_size"].history] == ["default", name, "fa4_page_constraint"]
        assert r.warnings == resolved["python"].warnings


@pytest.mark.parametrize("on", sorted(DEVICES))
def test_automatic_values_and_the_same_values_spelled_out(on: str) -> None:
    automatic = settle(on=on)
    explicit = settle(on=on, **automatic.values())
    assert explicit == automatic and not explicit.warnings
    assert settle(
        on=on,
        **automatic.values(),
    ) == settle(on=on, **dict(reversed(automatic.values().items())))
