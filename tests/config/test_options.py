"""Options: declared once, checked wherever they come from."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stenograph.config.options import OPTIONS, EngineOptions
from stenograph.config.sources import gather, merge, read_environment, read_file, read_flags
from stenograph.errors import ConfigError

COUNTS = [n for n, o in OPTIONS.items() if o.kind == "int" and o.low == 1 and not o.choices]


def test_a_value_equal_to_the_default_counts_as_set() -> None:
    options = EngineOptions(page_size=None, tp_size=1)
    assert options.is_set("tp_size") and not options.is_set("page_size")
    assert options.tp_size == 1 and options.port == 8000 and not options.is_set("port")


def test_paths_are_texts_too() -> None:
    assert EngineOptions.from_python(model=Path("a") / "b").model == str(Path("a") / "b")


def test_options_survive_pickling() -> None:
    options = EngineOptions(cuda_graph_bs=[8, 1, 8, 4], mem_fraction_static=1)
    assert options.cuda_graph_bs == (1, 4, 8) and options.mem_fraction_static == 1.0
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options and copy.explicit == options.explicit


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("text", ["0", "-1", "-2", "1.5", "abc", ""])
def test_counts_refuse_what_is_no_count(name: str, text: str) -> None:
    """A limit of 0 once let a server start whose first request never ended."""
    option = OPTIONS[name]
    if text == "-1" and -1 in option.also:
        assert "-1" in option.help
        assert option.parse(text) == -1
        return
    with pytest.raises(ConfigError) as error:
        option.parse(text)
    assert name in str(error.value) and option.flag in str(error.value) and "integer" in str(error.value)


@pytest.mark.parametrize("value", [0, -2, 1.5, "8", True, float("nan")])
def test_python_values_are_checked_too(value: object) -> None:
    with pytest.raises(ConfigError, match="tp_size"):
        EngineOptions.from_python(tp_size=value)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"page_sise.*page_size"):
        EngineOptions.from_python(page_sise=16)
    with pytest.raises(ConfigError, match=r"STENOGRAPH_PAGESIZE.*STENOGRAPH_PAGE_SIZE"):
        read_environment({"STENOGRAPH_PAGESIZE": "16"})
    with pytest.raises(ConfigError, match=r"'fa5'.*fa"):
        EngineOptions.from_python(attention_backend="fa5")


@pytest.mark.parametrize(("text", "value"), [
    ("0", False), ("1", True), ("false", False), ("TRUE", True), ("no", False), ("on", True), ("off", False),
])  # fmt: skip
def test_booleans_read_as_usual(text: str, value: bool) -> None:
    assert read_environment({"STENOGRAPH_STRICT": text})["strict"].value is value
    assert read_environment({"STENOGRAPH_PREFIX_CACHE": text})["prefix_cache"].value is value


def test_empty_variable_is_unset_and_unreadable_one_an_error_with_its_name() -> None:
    assert read_environment({"STENOGRAPH_STRICT": "", "STENOGRAPH_PORT": "  ", "PATH": "x"}) == {}
    with pytest.raises(ConfigError, match=r"STENOGRAPH_STRICT.*enabled.*true or false"):
        read_environment({"STENOGRAPH_STRICT": "enabled"})
    with pytest.raises(ConfigError, match=r"STENOGRAPH_PAGE_SIZE.*sixteen"):
        read_environment({"STENOGRAPH_PAGE_SIZE": "sixteen"})
    with pytest.raises(ConfigError, match=r"STENOGRAPH_THREADS.*\[1, 1024\]"):
        read_environment({"STENOGRAPH_THREADS": "3000000000"})  # more than a machine word holds


def test_flag_over_environment_over_file_over_default(tmp_path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("page-size: 8\nport: 9000\ncuda_graph_bs: [4, 1]\n")
    environment = {"STENOGRAPH_PAGE_SIZE": "2", "STENOGRAPH_TP_SIZE": "1"}
    options = gather({"page_size": "4"}, config=str(file), environment=environment)
    assert (options.page_size, options.port, options.cuda_graph_bs) == (4, 9000, (1, 4))
    sources = [(a.value, a.source) for a in options.asked["page_size"]]
    assert sources == [(8, "file"), (2, "env"), (4, "flag")]
    by_env = gather({}, environment={**environment, "STENOGRAPH_CONFIG": str(file)})
    assert by_env.page_size == 2 and by_env.port == 9000


def test_python_arguments_come_last_before_the_defaults() -> None:
    options = gather({}, environment={"STENOGRAPH_PAGE_SIZE": "2"}, python={"page_size": 8, "port": 1})
    assert options.page_size == 2 and options.port == 1
    assert [a.source for a in options.asked["page_size"]] == ["python", "env"]
    with pytest.raises(ConfigError, match=r"prot.*port"):
        gather({}, environment={}, python={"prot": 1})
    with pytest.raises(ConfigError, match="port"):
        gather({}, environment={}, python={"port": "many"})


def test_auto_on_a_higher_level_undoes_a_lower_one() -> None:
    options = merge(read_environment({"STENOGRAPH_PAGE_SIZE": "8"}), read_flags({"page_size": "auto"}))
    assert not options.is_set("page_size") and options.page_size is None


@pytest.mark.parametrize(("content", "message"), [
    ("page_sise: 1", r"page_sise.*page_size"),
    ("page_size: 3", r"settings.yaml.*page_size.*3"),
    ("port: many", r"settings.yaml.*port.*many"),
    ("- 1\n- 2", "no mapping"),
    ("a: [", "line"),
    ("port: 1\nport: 2", "port is set twice"),
    ("page-size: 1\npage_size: 2", "twice"),
    ("strict: 1", "strict"),
    ("port: 2024-99-99", r"settings.yaml cannot be read: month"),
    ("port: !!int many", r"settings.yaml cannot be read.*many"),
    ("strict: !!bool perhaps", r"settings.yaml cannot be read"),
    ("port: !!timestamp x", r"settings.yaml cannot be read"),
    ("port: " + 3000 * "[", "nested too deeply"),
])  # fmt: skip
def test_bad_files_say_what_is_wrong(tmp_path, content: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_file(file)


def test_missing_file_and_empty_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.yaml")
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert read_file(empty) == {}
