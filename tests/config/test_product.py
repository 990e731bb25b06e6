"""The whole product of the settings that meet: each combination resolves to what every chosen backend declares it
supports, or fails naming two settings."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

from stenograph.config.capabilities import capabilities
from stenograph.config.options import ATTENTION_BACKENDS
from stenograph.config.passes import PASSES
from stenograph.config.resolve import ResolutionError, Resolved, resolve
from stenograph.config.support import EVERYTHING
from tests.config.helpers import DEVICES, facts, settle

BACKENDS = (None, *ATTENTION_BACKENDS)
AXES: dict[str, tuple[Any, ...]] = {
    "attention_backend": BACKENDS,
    "prefill_attention_backend": BACKENDS,
    "decode_attention_backend": BACKENDS,
    "page_size": (None, 1, 16, 64, 128),
    "preset": ("qwen3-8b", "deepseek-v2-lite"),
    "topk": (0, 1, 4),
    "cuda_graph_backend_prefill": (None, "full", "piecewise", "disabled"),
    "on": ("cpu", "a100", "h200", "b200"),
    "kv_cache_dtype": ("auto", "fp8_e4m3", "fp8_e5m2"),
    "prefix_cache": (None, True),
}
STRIDE = 17  # coprime to every axis, so all values of all axes meet; the whole product has 622,080 cases


def cases() -> list[dict[str, Any]]:
    found = []
    for values in itertools.islice(itertools.product(*AXES.values()), 0, None, STRIDE):
        case = dict(zip(AXES, values, strict=True))
        topk = case.pop("topk")
        if topk:
            case |= {
                "speculative_algorithm": "eagle",
                "speculative_draft_model_path": "x",
                "speculative_eagle_topk": topk,
            }
        found.append(case)
    return found


def test_every_combination_resolves_or_names_two_settings() -> None:
    began = time.process_time()
    every, resolved_count = cases(), 0
    assert len(every) > 30_000
    for case in every:
        resolved = _settle_or_two_names(case)
        if resolved is None:
            continue
        resolved_count += 1
        _check_accepted(resolved, case)
        again = resolve(resolved.as_options(), resolved.facts, resolved.device_facts, support=EVERYTHING)
        assert again == resolved, (case, _differences(resolved, again))
        assert not again.warnings, (case, again.warnings)
    assert resolved_count > len(every) // 20
    assert time.process_time() - began < 60


def test_stride_lets_every_pair_of_values_meet() -> None:
    indexes = [len(axis) for axis in AXES.values()]
    seen: set[tuple[int, int, int, int]] = set()
    for values in itertools.islice(itertools.product(*(range(n) for n in indexes)), 0, None, STRIDE):
        seen.update((a, b, values[a], values[b]) for a, b in itertools.combinations(range(len(values)), 2))
    assert len(seen) == sum(a * b for a, b in itertools.combinations(indexes, 2))


def test_order_of_passes_does_not_matter() -> None:
    shuffle = random.Random(7)
    for case in cases()[::97]:
        expected = _settle_or_two_names(case)
        passes = list(PASSES)
        shuffle.shuffle(passes)
        options = {k: v for k, v in case.items() if k not in ("preset", "on")}
        try:
            device = DEVICES[case["on"]]
            got = resolve(_options(options), facts(case["preset"]), device, support=EVERYTHING, passes=passes)
        except ResolutionError:
            assert expected is None, case
        else:
            assert got == expected, (case, expected and _differences(expected, got))


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "gemma-3-1b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("on", sorted(DEVICES))
def test_defaults_resolve_on_every_device(preset: str, on: str) -> None:
    try:
        resolved = settle(preset=preset, on=on)
    except ResolutionError as error:
        assert preset == "deepseek-v3" and set(error.settings) == {"quantization", "device"}  # fp8 on a CPU or an A100
    else:
        _check_accepted(resolved, {})
        assert not resolved.warnings


def _options(values: dict[str, Any]) -> Any:
    from stenograph.config.options import EngineOptions

    return EngineOptions.from_python(**values)


def _settle_or_two_names(case: dict[str, Any]) -> Resolved | None:
    try:
        return settle(**case)
    except ResolutionError as error:
        for conflict in error.errors:
            assert len(getattr(conflict, "settings", ())) >= 2, (case, conflict)
            assert all(name in str(conflict) for name in conflict.settings)  # type: ignore[attr-defined]
            assert getattr(conflict, "remedy", "")
        return None


def _check_accepted(resolved: Resolved, case: dict[str, Any]) -> None:
    """What the backends declare, written out once more, apart from the rules."""
    mla = resolved.facts.mla is not None
    topk = resolved.speculative_eagle_topk or 0
    device = resolved.device_facts
    for name in (resolved.prefill_attention_backend, resolved.decode_attention_backend):
        caps = capabilities(name, mla=mla)
        assert device.generation in caps.generations, case
        assert resolved.page_size in caps.page_sizes, case
        assert topk <= 1 or resolved.page_size in caps.tree_page_sizes, case
        assert resolved.kv_cache_dtype in caps.kv_dtypes, case
        assert resolved.dtype in caps.dtypes, case
    if device.kind == "cuda":
        prefill = capabilities(resolved.prefill_attention_backend, mla=mla)
        decode = capabilities(resolved.decode_attention_backend, mla=mla)
        assert resolved.cuda_graph_backend_prefill in (*prefill.prefill_graphs, "disabled"), case
        assert resolved.cuda_graph_backend_decode in (*decode.decode_graphs, "disabled"), case
    named = (resolved.attention_backend, resolved.prefill_attention_backend, resolved.decode_attention_backend)
    if "fa4" in named and device.generation == 100 and not mla:
        assert resolved.page_size == (1 if topk > 1 else 128), case
    if case.get("cuda_graph_backend_prefill") is not None and device.kind == "cuda":
        assert resolved.cuda_graph_backend_prefill == case["cuda_graph_backend_prefill"], case


def _differences(a: Resolved, b: Resolved) -> dict[str, tuple[Any, Any]]:
    left, right = a.values(), b.values()
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}
