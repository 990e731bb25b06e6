"""The command line: settings explained and planned, failures on one line, a quick start without torch."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenograph.cli.main import main
from stenograph.config.options import OPTIONS
from stenograph.config.presets import presets

FA4 = ["explain", "--model-preset", "qwen3-8b", "--device", "b200", "--attention-backend", "fa4", "--format", "json"]


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STENOGRAPH_")]:
        monkeypatch.delenv(name)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments)
    answer: dict[str, Any] = json.loads(out)
    assert status == (2 if answer["errors"] else 0), err
    return answer


def test_fa4_on_blackwell(capsys) -> None:
    page = explain(capsys, *FA4)["settings"]["page_size"]
    assert (page["value"], page["source"], page["asked"]) == (128, "fa4_page_constraint", None)
    assert page["reason"] and [step["source"] for step in page["history"]][-1] == "fa4_page_constraint"


def test_fa4_with_a_draft_tree(capsys) -> None:
    tree = ["--speculative-algorithm", "eagle", "--speculative-draft-model-path", "X", "--speculative-eagle-topk", "4"]
    assert explain(capsys, *FA4, *tree)["settings"]["page_size"]["value"] == 1


@pytest.mark.parametrize(("preset", "device"), [("deepseek-v3", "b200"), ("qwen3-8b", "h200")])
def test_fa4_where_the_pass_does_not_apply(capsys, preset: str, device: str) -> None:
    command = [
        "explain",
        "--model-preset",
        preset,
        "--device",
        device,
        "--attention-backend",
        "fa4",
        "--format",
        "json",
    ]
    answer = explain(capsys, *command)
    assert answer["settings"]["page_size"]["source"] == "page_size_default" and not answer["errors"]
    assert answer["settings"]["attention_backend"]["value"] == "fa4"


def test_fa4_with_full_prefill_graphs(capsys) -> None:
    answer = explain(capsys, *FA4, "--cuda-graph-backend-prefill", "full")
    assert answer["settings"]["page_size"]["value"] == 128
    assert answer["settings"]["cuda_graph_backend_prefill"]["value"] == "full"
    assert answer["warnings"] == answer["errors"] == []


def test_fa4_with_another_page_size_warns_and_strict_refuses(capsys) -> None:
    answer = explain(capsys, *FA4, "--page-size", "16")
    assert answer["settings"]["page_size"]["value"] == 128 and answer["settings"]["page_size"]["asked"] == 16
    (warning,) = answer["warnings"]
    assert "16" in warning and "fa4_page_constraint" in warning and "128-token pages" in warning
    refused = explain(capsys, *FA4, "--page-size", "16", "--strict")
    assert refused["errors"] and "strict" in refused["errors"][0] and refused["settings"]["page_size"]
    status, out, err = run(capsys, *FA4[:-2], "--page-size", "16", "--strict")
    assert status == 2 and err.count("\n") == 1 and "page_size" in err and out == ""


def test_the_table_and_only_what_changed(capsys) -> None:
    status, out, _ = run(capsys, "explain", "qwen3-8b", "--device", "a100")
    lines = out.splitlines()
    assert (
        status == 0 and len(lines) == len(OPTIONS) + 1 and lines[0].split() == ["setting", "value", "source", "reason"]
    )
    _, out, _ = run(capsys, "explain", "qwen3-8b", "--device", "a100", "--changed", "--port", "8000")
    assert "host" not in out and "dtype_default" in out
    assert any(line.split()[:3] == ["port", "8000", "flag"] for line in out.splitlines())


def test_all_conflicts_are_printed(capsys) -> None:
    status, _, err = run(
        capsys, "explain", "qwen3-8b", "--device", "h200", "--tp-size", "3", "--context-length", "999999"
    )
    assert status == 2 and "tp_size" in err and "context_length" in err and err.count("steno: ") == 2


def test_sources_are_shown(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("page_size: 8\nport: 9000\n")
    monkeypatch.setenv("STENOGRAPH_PAGE_SIZE", "2")
    monkeypatch.setenv("STENOGRAPH_TP_SIZE", "1")
    for where in (0, 1):  # wherever --config stands
        flags = ["--page-size", "4"]
        flags[2 * where : 2 * where] = ["--config", str(file)]
        settings = explain(
            capsys, "explain", "--model-preset", "qwen3-8b", "--device", "h200", *flags, "--format", "json"
        )
        settings = settings["settings"]
        assert (settings["page_size"]["value"], settings["page_size"]["source"]) == (4, "flag")
        assert (settings["port"]["value"], settings["port"]["source"]) == (9000, "file")
        assert (settings["tp_size"]["value"], settings["tp_size"]["source"]) == (1, "env")
        assert settings["model"]["reason"] == "--model-preset"


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset_is_explained_and_planned(capsys, preset: str) -> None:
    assert explain(capsys, "explain", "--model-preset", preset, "--device", "b200", "--format", "json")["errors"] == []
    status, out, err = run(capsys, "plan", "--model-preset", preset, "--device", "b200", "--format", "json")
    plan = json.loads(out)
    assert (status == 0 and plan["plan"]["kv_tokens"] > 0) or (status == 2 and "does not fit" in plan["errors"][0]), err


def test_plan_says_what_fits_and_what_would_do(capsys) -> None:
    status, out, _ = run(capsys, "plan", "--model-preset", "llama-3.1-8b", "--device", "h100")
    assert status == 0 and "131,072 bytes a token" in out and "tokens fit" in out and "requests at once" in out
    status, _, err = run(capsys, "plan", "--model-preset", "llama-3.3-70b", "--device", "h100")
    assert status == 2 and "--tp-size 2 would do" in err


@pytest.mark.parametrize(("arguments", "message"), [
    (["explain", "--page-sise", "16"], "--page-sise. Did you mean --page-size?"),
    (["serve", "--max-runing-requests", "3"], "Did you mean --max-running-requests?"),
    (["explain", "--page-size", "3"], "--page-size) is 3; it must be one of 1, 2"),
    (["explain", "--tp-size", "1.5"], "--tp-size) is '1.5'; it must be an integer"),
    (["explain", "--device", "h20"], "Did you mean h200?"),
    (["explain", "--model-preset", "qwen3-8"], "Did you mean qwen3-"),
    (["explain", "a", "--model", "b"], "two models"),
    (["explain", "a", "--model-preset", "qwen3-8b"], "--model-preset"),
    (["explain", "--format", "jsn"], "Did you mean json?"),
    (["explain", "--config", "nowhere.yaml"], "nowhere.yaml"),
    (["explain", "./nowhere"], "nowhere"),
    (["serve", "./nowhere"], "nowhere"),
    (["generate", "--model", "./nowhere", "Hello"], "nowhere"),
    (["generate", "--temperature", "-1", "Hello"], "temperature"),
    (["generate", "--max-tokens", "0", "Hello"], "--max-tokens"),
    (["generate", "--temperature", "warm", "Hello"], "--temperature"),
    (["serve", "--port", "99999"], "--port"),
    (["bench", "decode", "--streams", "0"], "--streams"),
    (["bench", "decode", "--page-size", "5"], "--page-size"),
    (["bench", "offline", "--workloads", "d1,d2"], "d1, d32, p"),
    (["explian"], "explain"),
])  # fmt: skip
def test_failures_are_one_line(capsys, arguments: list[str], message: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and message in err and err.count("\n") == 1 and err.startswith("steno: ") and out == ""


TEXTS = st.one_of(st.text(max_size=6), st.sampled_from(["auto", "none", "0", "1", "-1", "16", "0.5", "1,2", "on"]))
FLAGS = st.lists(st.tuples(st.sampled_from([o for o in OPTIONS.values() if o.kind != "bool"]), TEXTS), max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=FLAGS, device=st.sampled_from(["h200", "b200", "a100"]))
def test_whatever_is_typed_there_is_an_answer_or_one_line(capsys, flags, device: str) -> None:
    words = [word for option, text in flags if option.name not in ("model", "device") for word in (option.flag, text)]
    status, out, err = run(capsys, "explain", "--model-preset", "qwen3-8b", "--device", device, *words)
    assert (status, bool(out)) in ((0, True), (2, False)), err
    assert status == 0 or all(line.startswith("steno: ") for line in err.splitlines())


def test_a_wrong_variable_stops_every_command(capsys, monkeypatch) -> None:
    monkeypatch.setenv("STENOGRAPH_PAGE_SISE", "16")
    status, _, err = run(capsys, "explain", "qwen3-8b", "--device", "h200")
    assert status == 2 and "STENOGRAPH_PAGE_SISE. Did you mean STENOGRAPH_PAGE_SIZE?" in err


def test_a_defect_of_ours_is_one_line_too(capsys, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something\nbroke")

    monkeypatch.setattr("stenograph.cli.explain.find_target", broken)
    status, _, err = run(capsys, "explain")
    assert status == 1 and err.count("\n") == 1 and "unexpected RuntimeError: something broke" in err


@pytest.mark.parametrize("command", ["", "serve", "generate", "explain", "plan", "bench", "bench decode"])
def test_help_lists_the_flags(capsys, command: str) -> None:
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0 and "Usage: steno" in out


def test_version(capsys) -> None:
    assert run(capsys, "version")[1].startswith("stenograph ")


CHECK = """
import sys
from stenograph.cli.main import main
try:
    main({arguments!r})
except SystemExit as end:
    heavy = {{"torch", "numpy", "transformers", "yaml", "fastapi"}} & set(sys.modules)
    sys.exit(f"imported {{heavy}}" if heavy else end.code)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["explain", "--device", "h200"], ["plan", "qwen3-8b", "--device", "b200"]]
)
def test_starts_in_half_a_second_and_imports_nothing_heavy(arguments: list[str]) -> None:
    times = []
    for _ in range(2):  # the first run may have to compile
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", CHECK.format(arguments=arguments)], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5


def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stenograph.engine.llm", None)
    status, _, err = run(capsys, "generate", "--model", "smollm2-135m", "hello")
    assert status == 2 and err.count("\n") == 1 and "is not installed. Install it: pip install" in err
