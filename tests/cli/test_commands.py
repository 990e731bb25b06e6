"""generate, serve and bench hand the right things on, and generate streams what LLM generates."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from stenograph import LLM, SamplingParams
from tests.cli.test_cli import no_settings_around, run
from tests.tiny import save_tiny

__all__ = ["no_settings_around"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(directory, "llama")
    return str(directory)


def expected(tiny: str, prompt: str, *, chat: bool = False, **params: Any) -> str:
    llm = LLM(tiny, dtype="float32", progress=False)
    sampling = SamplingParams(temperature=0, **params)
    ask = [{"role": "user", "content": prompt}]
    (answer,) = llm.chat(ask, sampling) if chat else llm.generate(prompt, sampling)
    llm.shutdown()
    return answer.outputs[0].text


def test_generate_streams_what_llm_generates(capsys, tiny: str) -> None:
    flags = ["--model", tiny, "--dtype", "float32", "--temperature", "0", "--max-tokens", "12"]
    status, out, _ = run(capsys, "generate", *flags, "Hello", "World")
    texts = [expected(tiny, prompt, max_tokens=12) for prompt in ("Hello", "World")]
    assert status == 0 and out == "".join(f"{text}\n" for text in texts)


def test_generate_reads_standard_input_and_chats(capsys, tiny: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    flags = ["--model", tiny, "--dtype", "float32", "--temperature", "0", "--max-tokens", "8", "--chat"]
    status, out, _ = run(capsys, "generate", *flags)
    assert status == 0 and out == expected(tiny, "Hello", chat=True, max_tokens=8) + "\n"


def test_generate_without_a_prompt(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    status, _, err = run(capsys, "generate")
    assert status == 2 and "empty" in err and err.count("\n") == 1


def test_serve_hands_over_resolved_settings_and_explains_them(capsys, tiny: str, monkeypatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("stenograph.server.launch.serve", lambda resolved, **more: served.append((resolved, more)))
    status, out, _ = run(capsys, "serve", tiny, "--device", "cpu", "--page-size", "64", "--explain")
    ((resolved, more),) = served
    assert status == 0 and (resolved.page_size, resolved.model, resolved.device) == (64, tiny, "cpu")
    assert more["source"].facts == resolved.facts
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines()}
    assert rows["page_size"] == ["64", "flag"] and rows["attention_backend"] == ["torch_native", "attention_default"]
    assert "host" not in rows


@pytest.mark.parametrize(("flags", "message"), [
    (["--prefix-cache"], "prefix_cache cannot run in this version yet"),
    (["--attention-backend", "fa3"], "prefill_attention_backend and device"),
    (["--context-length", "100000"], "context_length and model"),
    (["--speculative-algorithm", "ngram"], "speculative_algorithm ngram cannot run"),
    (["--device", "h200"], "auto, cuda, cpu"),
])  # fmt: skip
def test_serve_refuses_before_anything_starts(capsys, tiny: str, monkeypatch, flags, message) -> None:
    monkeypatch.setattr("stenograph.server.launch.serve", lambda *_, **__: pytest.fail("started"))
    status, _, err = run(capsys, "serve", tiny, *(["--device", "cpu"] if "--device" not in flags else []), *flags)
    assert status == 2 and message in err and err.count("\n") == 1


def test_bench_hands_options_and_workload_on(capsys, monkeypatch) -> None:
    calls: list[tuple[str, Any, dict[str, Any]]] = []
    for name in ("decode", "offline", "serve"):
        monkeypatch.setattr(
            f"stenograph.bench.{name}.run", lambda first, _n=name, **more: calls.append((_n, first, more))
        )
    run(capsys, "bench", "decode", "--page-size", "16", "--streams", "1,4", "--output-len", "8", "--compare")
    run(capsys, "bench", "offline", "--workloads", "d1, p", "--requests", "3")
    run(capsys, "bench", "serve", "--tp-size", "1", "--no-prefix-cache", "--rate", "2.5", "--config", "/dev/null")
    decode, offline, serve = calls
    assert decode[1].set_values() == {"page_size": 16} and decode[2]["streams"] == (1, 4)
    assert decode[2]["output_len"] == 8 and decode[2]["compare"] is True
    assert offline[1].set_values() == {} and offline[2] == {"workloads": ("d1", "p"), "requests": 3}
    assert serve[1] == ["--config", "/dev/null", "--tp-size", "1", "--no-prefix-cache"] and serve[2]["rate"] == 2.5
