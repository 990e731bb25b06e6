"""Whatever is set, at whatever values: an answer or an error for people, and no silent change of what the user set."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenograph.config.options import OPTIONS, EngineOptions, Option
from stenograph.config.plan import plan_memory
from stenograph.config.report import as_json, table
from stenograph.config.resolve import ResolutionError, resolve
from stenograph.config.sources import gather
from stenograph.config.support import EVERYTHING, THIS_VERSION, check_runnable
from stenograph.errors import ConfigError, OutOfMemoryError
from tests.config.helpers import DEVICES, facts

PRESETS = ("qwen3-8b", "smollm2-135m", "gemma-3-1b", "mistral-7b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")
RUNS = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def valid(option: Option) -> st.SearchStrategy[Any]:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.kind == "bool":
        return st.booleans()
    if option.kind == "str":
        return st.sampled_from(["x", "a/b", "draft"])
    if option.kind == "float":
        return st.floats(0.01, 1.0)
    low, high = int(option.low or 0), int(option.high or 100_000)
    numbers = st.one_of(st.integers(low, min(high, low + 40)), st.integers(low, high), *map(st.just, option.also))
    return st.lists(numbers, max_size=5) if option.kind == "ints" else numbers


def anything(option: Option) -> st.SearchStrategy[Any]:
    junk = st.one_of(
        st.none(), st.integers(), st.floats(), st.text(max_size=8), st.booleans(), st.lists(st.integers(), max_size=3),
        st.just("auto"), st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    )  # fmt: skip
    return st.one_of(valid(option), junk)


def some(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Values for a few options; of all at once nearly every set would be in conflict."""
    names = st.lists(st.sampled_from(sorted(OPTIONS)), max_size=8, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: kind(OPTIONS[name]) for name in chosen}))


@RUNS
@given(
    some(valid), st.sampled_from(PRESETS), st.sampled_from(sorted(DEVICES)), st.sampled_from([EVERYTHING, THIS_VERSION])
)
def test_no_traceback_and_no_silent_change(asked, preset, on, support) -> None:
    options = EngineOptions.from_python(**asked)
    try:
        resolved = resolve(options, facts(preset), DEVICES[on], support=support)
    except ResolutionError as error:
        assert error.errors and str(error)
        as_json(error.partial, errors=[str(error)])
        return
    for name, value in options.set_values().items():
        if getattr(resolved, name) != value:
            assert any(w.startswith(f"{name}: ") for w in resolved.warnings), (name, value)
            assert not resolved.strict
    assert len(resolved.warnings) == sum(getattr(resolved, n) != v for n, v in options.set_values().items())
    again = resolve(resolved.as_options(), resolved.facts, resolved.device_facts, support=support)
    assert again == resolved and not again.warnings
    assert table(resolved)
    try:
        plan = plan_memory(resolved)
        assert plan.kv_tokens >= resolved.page_size
    except OutOfMemoryError as error:
        assert error.remedy
    try:
        check_runnable(resolved)
    except ConfigError as error:
        assert "yet" in str(error)


@RUNS
@given(some(anything))
def test_any_python_value_is_taken_or_refused_by_name(asked) -> None:
    try:
        options = EngineOptions.from_python(**asked)
    except ConfigError as error:
        assert any(name in str(error) for name in asked)
    else:
        assert set(options.set_values()) <= set(asked)


@RUNS
@given(st.dictionaries(st.sampled_from(sorted(o.variable for o in OPTIONS.values())), st.text(max_size=12), max_size=4))
def test_any_variable_is_taken_or_refused_by_name(environment) -> None:
    try:
        gather({}, environment=environment)
    except ConfigError as error:
        assert any(name in str(error) for name in environment)
