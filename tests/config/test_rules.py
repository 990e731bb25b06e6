"""Each rule: when it applies, what it does."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from stenograph.config.capabilities import all_capabilities
from stenograph.config.device import NAMED, DeviceFacts, cpu_facts, device_facts, probe_device
from stenograph.config.options import ATTENTION_BACKENDS, GRAPH_BACKENDS, KV_DTYPES, PAGE_SIZES
from stenograph.config.resolve import ResolutionError, Resolved
from stenograph.config.rules.graphs import batch_ladder, token_ladder
from stenograph.config.rules.speculation import tree_capacity
from stenograph.config.support import EVERYTHING, THIS_VERSION, check_runnable
from stenograph.errors import ConfigError
from tests.config.helpers import CPU, facts, settle

EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model_path": "draft"}


def source(resolved: Resolved, name: str) -> str:
    return resolved.settings()[name].source


def without(device: str, *libraries: str) -> DeviceFacts:
    return dataclasses.replace(NAMED[device], libraries=NAMED[device].libraries - set(libraries))


# -- attention


@pytest.mark.parametrize(("on", "backend"), [
    ("cpu", "torch_native"), ("h200", "fa3"), ("h100", "fa3"), ("b200", "fa4"), ("a100", "triton"), ("l40s", "triton"),
])  # fmt: skip
def test_default_backend_by_device(on: str, backend: str) -> None:
    resolved = settle(on=on)
    assert (
        resolved.attention_backend == resolved.prefill_attention_backend == resolved.decode_attention_backend == backend
    )
    assert source(resolved, "attention_backend") == "attention_default"


@pytest.mark.parametrize(("on", "library"), [("h200", "flash_attn_3"), ("b200", "flash_attn_4")])
def test_default_backend_without_its_library_is_triton(on: str, library: str) -> None:
    resolved = settle(on=without(on, library))
    assert resolved.attention_backend == "triton"
    assert f"{library} is not installed" in resolved.settings()["attention_backend"].reason


def test_default_backend_follows_both_phases_or_the_one_that_is_set() -> None:
    both = settle(prefill_attention_backend="triton", decode_attention_backend="triton")
    one = settle(prefill_attention_backend="triton")
    for resolved in (both, one):
        assert resolved.attention_backend == resolved.decode_attention_backend == "triton"
    mixed = settle(prefill_attention_backend="triton", decode_attention_backend="fa3")
    assert (mixed.prefill_attention_backend, mixed.decode_attention_backend) == ("triton", "fa3")


@pytest.mark.parametrize("on", ["h200", "b200", "a100"])
def test_mla_models_get_the_mla_form(on: str) -> None:
    resolved = settle(preset="deepseek-v2-lite", on=on)
    assert "MLA form" in resolved.settings()["attention_backend"].reason


def test_large_heads_pass_fa4_over() -> None:
    assert settle(preset="gemma-3-1b", on="b200").attention_backend == "triton"


def test_fa3_with_e5m2_becomes_triton() -> None:
    resolved = settle(attention_backend="fa3", kv_cache_dtype="fp8_e5m2")
    assert resolved.attention_backend == resolved.decode_attention_backend == "triton"
    assert "fa3 -> triton" in resolved.warnings[0] and "fa3_fp8_e5m2" in resolved.warnings[0]
    one_phase = settle(decode_attention_backend="fa3", prefill_attention_backend="triton", kv_cache_dtype="fp8_e5m2")
    assert one_phase.decode_attention_backend == "triton"
    assert settle(attention_backend="fa3", kv_cache_dtype="fp8_e4m3").attention_backend == "fa3"
    assert not settle(kv_cache_dtype="fp8_e5m2").warnings  # chosen by us: triton from the start


@pytest.mark.parametrize(("options", "on", "preset", "settings"), [
    ({"attention_backend": "fa3"}, "a100", "qwen3-8b", ("prefill_attention_backend", "device")),
    ({"attention_backend": "triton"}, "cpu", "qwen3-8b", ("prefill_attention_backend", "device")),
    ({"attention_backend": "fa4"}, "b200", "gemma-3-1b", ("prefill_attention_backend", "model")),
    ({"attention_backend": "flashinfer", "page_size": 8}, "h200", "qwen3-8b",
     ("prefill_attention_backend", "page_size")),
    ({"attention_backend": "fa3", "dtype": "float32"}, "h200", "qwen3-8b", ("prefill_attention_backend", "dtype")),
    ({"kv_cache_dtype": "fp8_e4m3"}, "cpu", "qwen3-8b", ("prefill_attention_backend", "kv_cache_dtype")),
    ({"attention_backend": "flashinfer", "speculative_eagle_topk": 2, **EAGLE}, "h200", "deepseek-v2-lite",
     ("prefill_attention_backend", "speculative_eagle_topk")),
])  # fmt: skip
def test_what_a_backend_cannot_do_is_rejected(options, on, preset, settings) -> None:
    with pytest.raises(ResolutionError) as caught:
        settle(preset=preset, on=on, **options)
    assert caught.value.settings == settings


# -- pages


def test_fa4_forces_pages_of_128_on_blackwell() -> None:
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        resolved = settle(on="b200", **{name: "fa4"})
        assert resolved.page_size == 128 and source(resolved, "page_size") == "fa4_page_constraint"
    for graph in (*GRAPH_BACKENDS[:2], "disabled"):
        resolved = settle(on="b200", attention_backend="fa4", cuda_graph_backend_prefill=graph)
        assert (resolved.page_size, resolved.cuda_graph_backend_prefill, resolved.warnings) == (128, graph, ())
    tree = settle(on="b200", attention_backend="fa4", speculative_eagle_topk=4, **EAGLE)
    assert tree.page_size == 1 and source(tree, "page_size") == "fa4_tree"
    assert source(settle(on="h200", attention_backend="fa4"), "page_size") == "page_size_default"
    assert source(settle(preset="deepseek-v3", on="b200", attention_backend="fa4"), "page_size") == "page_size_default"
    assert settle(on="b200", attention_backend="fa4", speculative_eagle_topk=1, **EAGLE).page_size == 128


def test_fa4_changes_a_users_page_size_with_a_warning() -> None:
    resolved = settle(on="b200", attention_backend="fa4", page_size=16)
    assert resolved.page_size == 128
    (warning,) = resolved.warnings
    assert "16" in warning and "128" in warning and "fa4_page_constraint" in warning
    with pytest.raises(ResolutionError, match="strict"):
        settle(on="b200", attention_backend="fa4", page_size=16, strict=True)
    automatic = settle(on="b200", page_size=16)  # nobody asked for fa4, so the page size stays
    assert automatic.page_size == 16 and automatic.attention_backend == "triton" and not automatic.warnings


def test_page_size_default_keeps_the_page_table_small() -> None:
    assert settle(preset="smollm2-135m", on="cpu").page_size == 16
    assert settle(preset="qwen3-8b", on="h200").page_size == 64
    assert settle(preset="llama-3.1-8b", on="h200").page_size == 128
    assert settle(preset="smollm2-135m", on="cpu", max_total_tokens=8).page_size <= 8
    assert "page table" in settle().settings()["page_size"].reason


# -- graphs


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 100, 255, 256, 500, 4000, 10000])
def test_ladders_end_in_the_maximum(most: int) -> None:
    for ladder in (batch_ladder(most), token_ladder(most)):
        assert ladder[-1] == most and list(ladder) == sorted(set(ladder)) and ladder[0] >= 1
    assert batch_ladder(1) == (1,) and batch_ladder(7) == (1, 2, 4, 7)
    assert len(batch_ladder(most)) < 60 + most // 128


def test_graph_backends_by_phase() -> None:
    full = settle(on="h200")
    assert (full.cuda_graph_backend_decode, full.cuda_graph_backend_prefill) == ("full", "full")  # fa3 declares full
    cut = settle(on="h200", attention_backend="flashinfer")
    assert (cut.cuda_graph_backend_decode, cut.cuda_graph_backend_prefill) == ("full", "piecewise")
    mixed = settle(on="h200", prefill_attention_backend="fa3", decode_attention_backend="flashinfer")
    assert mixed.cuda_graph_backend_prefill == "piecewise"
    cpu = settle(on="cpu")
    assert (cpu.cuda_graph_backend_decode, cpu.cuda_graph_backend_prefill) == ("disabled", "disabled")
    now = settle(on="cpu", support=THIS_VERSION)
    assert now.cuda_graph_backend_decode == "disabled" and now.cuda_graph_bs == ()


def test_graph_sizes() -> None:
    assert settle(max_running_requests=1).cuda_graph_bs == (1,)
    assert settle(max_running_requests=500).cuda_graph_bs[-1] == 500
    assert settle(chunked_prefill_size=3000).cuda_graph_prefill_tokens[-1] == 3000
    assert settle(cuda_graph_bs=[4, 1, 4, 2]).cuda_graph_bs == (1, 2, 4)
    clipped = settle(cuda_graph_bs=[1, 8, 500], max_running_requests=64)
    assert clipped.cuda_graph_bs == (1, 8, 64) and "1,8,500 -> 1,8,64" in clipped.warnings[0]
    for bad in ([0, 1], [-1], ["a"], [True]):
        with pytest.raises(ConfigError, match="cuda_graph_bs"):
            settle(cuda_graph_bs=bad)
    off = settle(cuda_graph_backend_decode="disabled", cuda_graph_bs=[1])
    assert off.cuda_graph_bs == () and off.warnings


def test_full_prefill_graphs() -> None:
    for page in PAGE_SIZES:
        resolved = settle(on="h200", attention_backend="fa3", cuda_graph_backend_prefill="full", page_size=page)
        assert resolved.page_size == page and resolved.cuda_graph_prefill_slots == 16
    with pytest.raises(ResolutionError) as caught:
        settle(on="h200", attention_backend="flashinfer", cuda_graph_backend_prefill="full")
    assert any(
        set(e.settings) == {"cuda_graph_backend_prefill", "prefill_attention_backend"} for e in caught.value.errors
    )
    assert (
        settle(
            attention_backend="fa3", cuda_graph_prefill_slots=500, max_running_requests=8
        ).cuda_graph_prefill_slots
        == 8
    )


def test_cuda_graphs_on_a_cpu_become_trace_with_a_warning() -> None:
    resolved = settle(on="cpu", cuda_graph_backend_decode="full")
    assert resolved.cuda_graph_backend_decode == "trace" and "full -> trace" in resolved.warnings[0]


# -- speculation


def test_tree_capacity() -> None:
    assert tree_capacity(3, 1) == 4 and tree_capacity(1, 4) == 5 and tree_capacity(3, 2) == 1 + 2 + 8


def test_speculative_numbers_are_filled_together() -> None:
    resolved = settle(**EAGLE)
    assert [resolved.speculative_num_steps, resolved.speculative_eagle_topk, resolved.speculative_num_draft_tokens] == [
        3,
        1,
        4,
    ]
    tree = settle(speculative_eagle_topk=4, **EAGLE)
    assert tree.speculative_num_draft_tokens == 16 <= tree_capacity(3, 4)
    assert settle(speculative_num_draft_tokens=8, **EAGLE).speculative_num_steps == 7
    assert settle(speculative_algorithm="ngram").speculative_num_draft_tokens == 5
    assert "speculation" in resolved.settings()["max_running_requests"].reason
    assert settle(max_running_requests=200, **EAGLE).max_running_requests == 200


@pytest.mark.parametrize(("options", "names"), [
    ({"speculative_algorithm": "eagle"}, {"speculative_draft_model_path", "speculative_algorithm"}),
    ({"speculative_eagle_topk": 0, **EAGLE}, {"speculative_eagle_topk", "speculative_algorithm"}),
    ({"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5, **EAGLE},
     {"speculative_num_draft_tokens", "speculative_num_steps"}),
    ({"speculative_num_steps": 1, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 6, **EAGLE},
     {"speculative_num_draft_tokens", "speculative_eagle_topk"}),
    ({"speculative_algorithm": "ngram", "speculative_eagle_topk": 2},
     {"speculative_eagle_topk", "speculative_algorithm"}),
])  # fmt: skip
def test_trees_that_cannot_be_are_rejected(options, names) -> None:
    with pytest.raises(ResolutionError) as caught:
        settle(**options)
    assert set(caught.value.settings) == names


# -- scheduling, model, memory


def test_overlap_and_prefix_cache_are_excluded_with_a_reason() -> None:
    assert settle().overlap_schedule is True and settle().prefix_cache is True
    ngram = settle(speculative_algorithm="ngram", overlap_schedule=True)
    assert ngram.overlap_schedule is False and "n-gram" in ngram.warnings[0]
    assert settle(on="cpu", overlap_schedule=True).overlap_schedule is False
    tiny = settle(context_length=64, page_size=64, prefix_cache=True)
    assert tiny.prefix_cache is False and "overflow" not in tiny.warnings[0] and "64" in tiny.warnings[0]


def test_tensor_parallel_names_the_valid_sizes() -> None:
    with pytest.raises(ResolutionError, match=r"tp_size.*Valid sizes: 1, 2, 4, 8"):
        settle(tp_size=3)
    with pytest.raises(ResolutionError, match=r"tp_size and device"):
        settle(tp_size=16)
    assert settle(preset="smollm2-135m", tp_size=3).tp_size == 3  # 9 heads, 3 key-value heads
    assert settle(preset="deepseek-v3", tp_size=8).tp_size == 8


def test_context_length_is_at_most_the_models() -> None:
    assert settle(context_length=1000).context_length == 1000
    with pytest.raises(ResolutionError, match=r"context_length.*50000.*40960"):
        settle(context_length=50_000)


def test_dtype_by_device() -> None:
    old = dataclasses.replace(CPU, bfloat16=False)
    assert settle(on="cpu").dtype == "bfloat16" and settle(on=old).dtype == "float32"
    assert "bfloat16" in settle(on=old).settings()["dtype"].reason
    assert settle(on="h200").dtype == "bfloat16" and settle(on="h200", dtype="float16").dtype == "float16"
    half = settle(on="cpu", dtype="float16")
    assert half.dtype == "float32" and "float16 -> float32" in half.warnings[0]


def test_quantisation_is_checked() -> None:
    assert settle(preset="deepseek-v3", on="b200").quantization == "fp8"
    for options, names in (
        ({"preset": "deepseek-v3", "on": "a100"}, {"quantization", "device"}),
        ({"quantization": "awq"}, {"quantization", "model"}),
    ):
        with pytest.raises(ResolutionError) as caught:
            settle(**options)
        assert set(caught.value.settings) == names
    assert settle(preset="deepseek-v3", load_format="dummy", on="a100").quantization == "none"


def test_memory_fraction_is_checked_both_ways() -> None:
    with pytest.raises(ResolutionError, match=r"Raise --mem-fraction-static to 0\.2"):
        settle(on="h100", mem_fraction_static=0.1)
    with pytest.raises(ResolutionError, match=r"Lower --mem-fraction-static to 0\.98"):
        settle(on="rtx4090", preset="qwen3-0.6b", mem_fraction_static=0.995)


def test_pool_caps() -> None:
    with pytest.raises(ResolutionError, match="max_total_tokens and page_size"):
        settle(max_total_tokens=10, page_size=16)
    small = settle(max_total_tokens=128, page_size=16)
    assert small.max_running_requests == 8 and small.chunked_prefill_size == 128
    asked = settle(max_total_tokens=128, page_size=16, max_running_requests=100)
    assert asked.max_running_requests == 8 and "100 -> 8" in asked.warnings[0]


# -- records


def test_resolved_is_frozen_picklable_and_complete() -> None:
    resolved = settle(on="b200", attention_backend="fa4", page_size=16)
    with pytest.raises(AttributeError):
        resolved.page_size = 1
    with pytest.raises(AttributeError, match="page_sise"):
        _ = resolved.page_sise
    copy = pickle.loads(pickle.dumps(resolved))
    assert copy == resolved and copy.settings() == resolved.settings() and copy.warnings == resolved.warnings
    assert settle(chunked_prefill_size=-1).step_prefill_tokens == 40960


def test_automatic_values_always_run() -> None:
    for on in ("cpu", "h200", "b200", "a100", "rtx4090"):
        check_runnable(settle(preset="qwen3-0.6b", on=on, support=THIS_VERSION))


@pytest.mark.parametrize(("options", "preset", "message"), [
    ({"attention_backend": "fa3"}, "qwen3-8b", "attention_backend fa3"),
    ({"cuda_graph_backend_decode": "piecewise"}, "qwen3-8b", "cuda_graph_backend_decode"),
    ({"prefix_cache": True}, "qwen3-8b", "prefix_cache"),
    ({"speculative_algorithm": "ngram"}, "qwen3-8b", "speculative_algorithm ngram"),
    ({}, "qwen3-30b-a3b", "mixture-of-experts"),
    ({"load_format": "dummy"}, "deepseek-v2-lite", "latent"),
    ({}, "deepseek-v3", "fp8"),
])  # fmt: skip
def test_what_is_not_built_is_refused_at_start(options, preset, message) -> None:
    resolved = settle(preset=preset, on="h200", support=THIS_VERSION, **options)
    with pytest.raises(ConfigError, match=message):
        check_runnable(resolved)


def test_capabilities_declare_only_known_names() -> None:
    for caps in all_capabilities():
        assert caps.name in ATTENTION_BACKENDS and set(caps.page_sizes) <= set(PAGE_SIZES)
        assert set(caps.tree_page_sizes) <= set(caps.page_sizes) and caps.kv_dtypes <= set(KV_DTYPES)
        assert (caps.prefill_graphs | caps.decode_graphs) <= set(GRAPH_BACKENDS)
    assert len(all_capabilities()) == 2 * len(ATTENTION_BACKENDS)
    assert EVERYTHING.attention == set(ATTENTION_BACKENDS)


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same_gpu() -> None:
    seen, probed = device_facts("auto"), DeviceFacts.probe("auto")
    assert dataclasses.replace(seen, memory_bytes=0) == dataclasses.replace(probed, memory_bytes=0)
    assert abs(seen.memory_bytes - probed.memory_bytes) < 1 << 30  # the driver's own share


def test_devices() -> None:
    assert device_facts("cpu").kind == "cpu" and cpu_facts().memory_bytes > 1 << 28
    assert [NAMED[n].generation for n in ("a100", "l40s", "h200", "b200")] == [80, 89, 90, 100]
    with pytest.raises(ConfigError, match=r"h20.*h200"):
        device_facts("h20")
    with pytest.raises(ConfigError, match="explain and plan"):
        probe_device("h200")
    with pytest.raises(ResolutionError, match="device"):
        settle(on="h200", device="cpu")
    assert facts("qwen3-8b").head_dim == 128
