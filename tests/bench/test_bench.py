"""The workloads are the published ones; every benchmark ends with one JSON line; decode runs beside transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stenograph.bench import decode, offline
from stenograph.bench.report import report
from stenograph.bench.roofline import copy_bandwidth, step_bytes
from stenograph.bench.workloads import NAMES, named
from stenograph.config.options import EngineOptions
from tests.tiny import save_tiny


def test_the_offline_workload_is_drawn_as_published() -> None:
    w1 = named("w1", vocab_size=151_936)
    assert (len(w1.prompts), w1.num_input, w1.num_output) == (256, 142_827, 133_966)
    assert all(100 <= n <= 1024 for n in [*map(len, w1.prompts), *w1.output_lens])
    assert all(p.ignore_eos and p.temperature == 0 for p in w1.params())
    warm = named("w1t", vocab_size=151_936)
    assert warm.prompts == w1.prompts and {p.temperature for p in warm.params()} == {0.6}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_stay_within_the_vocabulary(name: str) -> None:
    load = named(name, vocab_size=50, requests=3)
    assert len(load.prompts) == len(load.output_lens) == len(load.params()) == 3
    assert max(map(max, load.prompts)) < 50


def test_a_report_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    made = report("a title", [{"name": "x", "tok/s": 1234.5, "n": None}], device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == made and made["rows"][0]["tok/s"] == 1234.5
    assert any("1,234" in line or "1,235" in line for line in lines[:-1])


def test_roofline() -> None:
    assert step_bytes(weight_bytes=100, kv_bytes_per_token=2, streams=3, mean_context=10) == 160
    assert 1e8 < copy_bandwidth("cpu") < 1e13


def test_decode_and_offline_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, max_position_embeddings=2048)
    options = EngineOptions.from_python(model=str(tmp_path), max_total_tokens=4096)
    made = decode.run(options, streams=(1, 2), input_len=4, output_len=6, repeats=1, compare=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == made
    one, two = made["rows"]
    assert one["times one stream"] == 1 and two["streams"] == 2
    assert all(row["tok/s"] > 0 and row["transformers tok/s"] > 0 and row["MBU %"] > 0 for row in (one, two))
    made = offline.run(options, workloads=("p",), requests=2)
    assert made["rows"][0]["input tokens"] == 2048 and made["rows"][0]["output tokens"] == 2
