"""Failures that users of other engines met while settings were resolved. Each must not be possible here."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from stenograph.config.capabilities import capabilities
from stenograph.config.options import ATTENTION_BACKENDS, OPTIONS, PAGE_SIZES, EngineOptions
from stenograph.config.plan import plan_memory
from stenograph.config.resolve import ResolutionError, resolve
from stenograph.config.sources import gather, read_environment
from stenograph.config.support import EVERYTHING
from stenograph.errors import ConfigError, OutOfMemoryError
from tests.config.helpers import DEVICES, facts, settle

EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model_path": "draft"}


@pytest.mark.parametrize("page", [1, 16, 64])
def test_a01_chunking_off_goes_with_every_page_size(page: int) -> None:
    resolved = settle(chunked_prefill_size=-1, page_size=page)
    assert resolved.chunked_prefill_size == -1 and not resolved.warnings
    assert resolved.step_prefill_tokens == resolved.context_length
    assert "-1" in OPTIONS["chunked_prefill_size"].help


def test_a02_no_count_takes_zero_or_less_unless_it_says_so() -> None:
    for name, option in OPTIONS.items():
        if option.kind not in ("int", "ints") or option.choices:
            continue
        for text in ("0", "-1", "-2", "1.5", "abc"):
            try:
                value = option.parse(text)
            except ConfigError as error:
                assert name in str(error) and text in str(error)
            else:
                assert f"{value if option.kind == 'int' else value[0]}" in option.help or name == "random_seed"


def test_a03_combined_and_phase_flags_give_one_page_size() -> None:
    for backend, on in (("fa4", "b200"), ("fa3", "h200"), ("triton", "a100")):
        spelled: list[dict[str, Any]] = [
            {"attention_backend": backend},
            {"prefill_attention_backend": backend, "decode_attention_backend": backend},
            {"prefill_attention_backend": backend},
        ]
        first, *others = (settle(on=on, **options) for options in spelled)
        assert all(other == first for other in others)


@pytest.mark.parametrize("on", ["h200", "b200", "a100"])
def test_a04_automatic_choice_has_one_rule_and_only_the_backends_own_limits(on: str) -> None:
    for topk, page in itertools.product((None, 1, 4), (None, 1, 16, 64)):
        speculation = {} if topk is None else {**EAGLE, "speculative_eagle_topk": topk}
        resolved = settle(on=on, **speculation, **({} if page is None else {"page_size": page}))
        setting = resolved.settings()["attention_backend"]
        assert setting.source == "attention_default" and setting.reason
        assert not resolved.warnings and resolved.page_size == (page or resolved.page_size)
        if on == "h200":
            assert resolved.attention_backend == "fa3"  # fa4's page rule has no say here
        if on == "b200":
            fits = page in (None, 1 if topk == 4 else 128)
            assert resolved.attention_backend == ("fa4" if fits else "triton")


def test_a05_an_algorithm_alone_is_filled_in() -> None:
    settings = settle(**EAGLE).settings()
    for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
        assert settings[name].value and settings[name].source == "speculative_default"


@pytest.mark.parametrize("draft", [1, 3, 4, 5, 16])
def test_a06_illegal_trees_show_at_once(draft: int) -> None:
    options = {**EAGLE, "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": draft}
    if draft == 4:
        assert settle(**options).speculative_num_draft_tokens == 4
    else:
        with pytest.raises(ResolutionError, match="exactly 4 draft tokens"):
            settle(**options)


def test_a06_zero_steps_and_zero_topk() -> None:
    with pytest.raises(ConfigError, match="speculative_num_steps"):
        settle(**EAGLE, speculative_num_steps=0)
    with pytest.raises(ResolutionError, match="top-k 0"):
        settle(**EAGLE, speculative_eagle_topk=0)


@pytest.mark.parametrize("preset", ["qwen3-8b", "deepseek-v2-lite"])
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_a07_topk_works_or_fails_before_the_start(preset: str, backend: str) -> None:
    caps = capabilities(backend, mla=preset.startswith("deepseek"))
    on = next(name for name, device in DEVICES.items() if device.generation in caps.generations and name != "cpu")
    options = {**EAGLE, "speculative_eagle_topk": 4, "attention_backend": backend}
    if caps.tree_masks:
        assert settle(preset=preset, on=on, **options).page_size in caps.tree_page_sizes
    else:
        with pytest.raises(ResolutionError, match="speculative_eagle_topk"):
            settle(preset=preset, on=on, **options)


def test_a08_every_way_in_gives_the_same(tmp_path) -> None:
    for name, option in OPTIONS.items():
        value = (
            option.choices[-1]
            if option.choices
            else {"bool": True, "str": "x", "float": 0.5, "ints": (3,)}.get(option.kind, 3)
        )
        text = (
            ",".join(map(str, value))
            if isinstance(value, tuple)
            else str(value).lower()
            if value is True
            else str(value)
        )
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"{name.replace('_', '-')}: {list(value) if isinstance(value, tuple) else text}\n")
        ways = [
            gather({name: value if option.kind == "bool" else text}, environment={}),
            gather({}, environment={option.variable: text}),
            gather({}, config=str(file), environment={}),
            EngineOptions.from_python(**{name: value}),
        ]
        assert all(getattr(options, name) == value and options.is_set(name) for options in ways), name


@pytest.mark.parametrize("preset", ["qwen3-8b", "deepseek-v2-lite"])
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("graph", ["full", "piecewise"])
@pytest.mark.parametrize("speculation", [{}, EAGLE])
def test_a09_explicit_prefill_graphs_are_honoured_or_refused(preset, page, graph, speculation) -> None:
    try:
        resolved = settle(preset=preset, page_size=page, cuda_graph_backend_prefill=graph, **speculation)
    except ResolutionError as error:
        assert any("cuda_graph_backend_prefill" in e.settings for e in error.errors)  # type: ignore[attr-defined]
    else:
        assert resolved.cuda_graph_backend_prefill == graph and not resolved.warnings


def test_a10_resolving_twice_and_in_any_order() -> None:
    asked: dict[str, Any] = {
        "page_size": 16,
        "attention_backend": "fa4",
        "max_total_tokens": 4096,
        "tp_size": 2,
        **EAGLE,
    }
    first = settle(on="b200", **asked)
    for seed in range(5):
        names = list(asked)
        random.Random(seed).shuffle(names)
        assert settle(on="b200", **{name: asked[name] for name in names}) == first
    again = resolve(first.as_options(), first.facts, first.device_facts, support=EVERYTHING)
    assert again == first


def test_a11_memory_advice_points_the_right_way() -> None:
    with pytest.raises(ResolutionError, match=r"Raise --mem-fraction-static to 0\.\d+"):
        settle(on="h100", mem_fraction_static=0.05)
    with pytest.raises(ResolutionError, match=r"Lower --mem-fraction-static to 0\.98"):
        settle(on="rtx4090", preset="qwen3-0.6b", mem_fraction_static=0.999)
    with pytest.raises(OutOfMemoryError, match=r"activations.*--chunked-prefill-size 2048 would do"):
        plan_memory(settle(on="rtx4090", preset="llama-3.1-8b", mem_fraction_static=0.95, chunked_prefill_size=-1))


def test_a12_flags_beat_variables_beat_the_file(tmp_path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("page_size: 8\n")
    everything = gather({"page_size": "4"}, config=str(file), environment={"STENOGRAPH_PAGE_SIZE": "2"})
    assert everything.page_size == 4
    assert gather({}, config=str(file), environment={"STENOGRAPH_PAGE_SIZE": "2"}).page_size == 2
    assert gather({}, config=str(file), environment={}).page_size == 8
    resolved = resolve(everything, facts("qwen3-8b"), DEVICES["h200"], support=EVERYTHING)
    assert resolved.settings()["page_size"].source == "flag"


def test_a13_booleans_from_the_environment() -> None:
    table = {"0": False, "1": True, "false": False, "TRUE": True, "no": False, "on": True}
    for name in (n for n, o in OPTIONS.items() if o.kind == "bool"):
        variable = OPTIONS[name].variable
        for text, value in table.items():
            assert read_environment({variable: text})[name].value is value
        assert read_environment({variable: ""}) == {}
        with pytest.raises(ConfigError, match=variable):
            read_environment({variable: "enabled"})


def test_a14_a_chunk_beyond_what_a_step_can_hold_is_clamped_aloud() -> None:
    resolved = settle(chunked_prefill_size=4096, max_total_tokens=2048)
    assert resolved.chunked_prefill_size == 2048
    assert any("chunked_prefill_size: 4096 -> 2048" in w and "chunk_fits_pool" in w for w in resolved.warnings)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_a15_mla_pages_are_legal_or_named(backend: str, page: int) -> None:
    caps = capabilities(backend, mla=True)
    on = next(name for name, device in DEVICES.items() if device.generation in caps.generations and name != "cpu")
    try:
        resolved = settle(preset="deepseek-v2-lite", on=on, attention_backend=backend, page_size=page)
    except ResolutionError as error:
        assert page not in caps.page_sizes
        assert f"pages hold {', '.join(map(str, caps.page_sizes))} tokens" in str(error)
    else:
        assert page in caps.page_sizes and resolved.page_size == page and not resolved.warnings


@pytest.mark.parametrize(("options", "on", "name", "shown"), [
    ({"overlap_schedule": True}, "cpu", "overlap_schedule", False),
    ({"prefix_cache": True, "context_length": 64, "page_size": 64}, "h200", "prefix_cache", False),
    ({"speculative_eagle_topk": 4}, "h200", "speculative_eagle_topk", None),
    ({"speculative_num_steps": 4}, "h200", "speculative_num_steps", None),
    ({"speculative_draft_model_path": "x"}, "h200", "speculative_draft_model_path", None),
    ({"cuda_graph_bs": [1], "cuda_graph_backend_decode": "disabled"}, "h200", "cuda_graph_bs", ()),
    ({"cuda_graph_prefill_slots": 4, "cuda_graph_backend_prefill": "piecewise"}, "h200",
     "cuda_graph_prefill_slots", None),
])  # fmt: skip
def test_a16_a_flag_without_effect_is_told_and_shown_as_off(options, on, name, shown) -> None:
    resolved = settle(on=on, **options)
    assert getattr(resolved, name) == shown
    assert any(w.startswith(f"{name}: ") and "because" in w for w in resolved.warnings)


def test_a17_every_cell_of_the_backend_table_works_or_names_both() -> None:
    worked = failed = 0
    for backend, preset, page, topk, graph in itertools.product(
        ATTENTION_BACKENDS,
        ("qwen3-8b", "deepseek-v2-lite"),
        (1, 16, 64, 128),
        (None, 1, 4),
        ("piecewise", "full", "disabled"),
    ):
        caps = capabilities(backend, mla=preset.startswith("deepseek"))
        on = "b200" if 100 in caps.generations and backend == "fa4" else "h200"
        speculation = {} if topk is None else {**EAGLE, "speculative_eagle_topk": topk}
        options = {"attention_backend": backend, "page_size": page, "cuda_graph_backend_prefill": graph, **speculation}
        try:
            resolved = settle(preset=preset, on=on, **options)
        except ResolutionError as error:
            failed += 1
            assert len(error.settings) == 2 and error.remedy
            assert graph == "full" or page not in caps.pages(topk) or (topk == 4 and not caps.tree_masks)
        else:
            worked += 1
            assert resolved.cuda_graph_backend_prefill == graph and resolved.page_size in caps.pages(topk)
    assert worked > 150 and failed > 50


def test_c1_full_prefill_graphs_and_forced_pages_of_128() -> None:
    forced = settle(on="b200", attention_backend="fa4", cuda_graph_backend_prefill="full")
    assert (forced.page_size, forced.cuda_graph_backend_prefill, forced.warnings) == (128, "full", ())


def test_c2_an_unreadable_variable_is_an_error_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"STENOGRAPH_MEM_FRACTION_STATIC.*'a lot'"):
        read_environment({"STENOGRAPH_MEM_FRACTION_STATIC": "a lot"})


def test_c3_an_unknown_argument_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"max_runing_requests.*max_running_requests"):
        EngineOptions.from_python(max_runing_requests=4)


def test_c5_exactly_the_sizes_that_were_asked_for() -> None:
    assert settle(max_running_requests=1).cuda_graph_bs == (1,)
    assert settle(cuda_graph_bs=[1]).cuda_graph_bs == (1,)


def test_c6_the_plan_counts_graphs_once() -> None:
    resolved = settle(on="h200")
    plan = plan_memory(resolved)
    without = plan_memory(
        settle(on="h200", cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled")
    )
    page_bytes = resolved.page_size * plan.kv_bytes_per_token
    assert plan.graph_bytes_most > without.graph_bytes_most == 0
    lost = without.kv_bytes - plan.kv_bytes
    assert abs(lost - (plan.graph_bytes_most - (without.workspace_bytes - plan.workspace_bytes))) <= page_bytes
