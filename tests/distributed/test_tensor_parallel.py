"""Two ranks over gloo against one: logits within 1e-4, through the same loading code."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stenograph import LLM, SamplingParams
from stenograph.distributed import workers
from stenograph.distributed.tensor_parallel import TensorParallel
from stenograph.errors import ConfigError, EngineDeadError
from tests.tiny import ARCHITECTURES, greedy_reference, save_tiny

PROMPTS = [[5, 6, 7], list(range(40)), [9]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: Any) -> dict[str, tuple[Path, Any]]:
    made = {}
    for architecture in ARCHITECTURES:
        directory = tmp_path_factory.mktemp(architecture)
        made[architecture] = (directory, save_tiny(directory, architecture, vocab_size=321))
    return made


def _rank(rank: int, port: int, paths: list[Path], answers: Any) -> None:
    from stenograph.attention.base import BatchLayout
    from stenograph.attention.torch_native import TorchNativeBackend
    from stenograph.layers.linear import Build
    from stenograph.loading.loader import load_model
    from stenograph.loading.source import open_model
    from stenograph.memory.kv_cache import KVCache
    from stenograph.models.registry import build_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tp = TensorParallel(rank=rank, size=2, group=dist.group.WORLD)
    for path in paths:
        source = open_model(str(path))
        with torch.inference_mode():
            model = build_model(Build(torch.device("cpu"), torch.float32, tp), source.facts, 512)
            load_model(source, model, rank=rank, world_size=2, progress=False)
            spec = model.layers[0].self_attn.spec
            cache = KVCache(
                num_layers=source.facts.num_layers,
                num_pages=50,
                page_size=1,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            ids = torch.arange(40)
            layout = BatchLayout(
                num_decode=0, query_lens=[40], kv_lens=[40], page_tables=[list(range(1, 41))], token_slots_T=ids + 1
            )
            plan = TorchNativeBackend(cache).plan(layout)
            logits = model.logits(model.forward(ids, ids, plan))
        answers.put((rank, str(path), logits.numpy().tobytes()))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_give_the_logits_of_one(directories: dict[str, tuple[Path, Any]]) -> None:
    """Every architecture, with a vocabulary that two ranks cannot share equally."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    paths = [path for path, _ in directories.values()]
    workers = [context.Process(target=_rank, args=(rank, port, paths, answers)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=120) for _ in range(2 * len(paths))]
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    for path, reference in directories.values():
        with torch.inference_mode():
            expected = reference(torch.arange(40).unsqueeze(0)).logits[0]
        for _, where, data in found:
            if where == str(path):
                logits = torch.frombuffer(bytearray(data), dtype=torch.float32).view_as(expected)
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_engine_with_two_ranks_gives_the_tokens_of_one(directories: dict[str, tuple[Path, Any]]) -> None:
    path, reference = directories["llama"]
    llm = LLM(str(path), tp_size=2, dtype="float32", device="cpu", threads=1, max_total_tokens=1024, progress=False)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        answers = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, greedy)]
        assert answers == [greedy_reference(reference, p, 16) for p in PROMPTS]
        drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, frequency_penalty=0.5)
        first, second = (llm.generate(PROMPTS, drawn)[1].outputs[0].token_ids for _ in range(2))
        assert first == second
        # A step that fails on one rank leaves the others in the middle of it: no further step may run.
        with pytest.raises(EngineDeadError, match="2 ranks failed"):
            llm.core.executor._rank0.execute = lambda step: 1 / 0
            llm.generate(PROMPTS, greedy)
    finally:
        llm.shutdown()


def test_ranks_wait_for_the_next_step_as_long_as_it_takes() -> None:
    """An engine without requests must not die of gloo's own limit, half an hour."""
    store = workers.TCPStore("127.0.0.1", 0, is_master=True)
    _, control = workers._join(0, SimpleNamespace(device="cpu", tp_size=1), store)
    try:
        assert control._get_backend(torch.device("cpu")).options._timeout.days >= 300
    finally:
        dist.destroy_process_group()


def test_shares_must_be_equal() -> None:
    with pytest.raises(ConfigError, match="3, which 2 ranks"):
        TensorParallel(rank=0, size=2).share(3, "the number of attention heads")


def test_a_rank_that_dies_before_it_joins_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama")
    monkeypatch.setattr(workers, "_worker", _dies)
    with pytest.raises(EngineDeadError, match="stenograph-rank-1 died"):
        LLM(str(tmp_path), tp_size=2, dtype="float32", device="cpu", max_total_tokens=256, progress=False)


def _dies(rank: int, resolved: Any, port: int) -> None:
    raise SystemExit(3)


def test_a_rank_that_is_killed_is_named(directories: dict[str, tuple[Path, Any]]) -> None:
    path, _ = directories["llama"]
    llm = LLM(str(path), tp_size=2, dtype="float32", device="cpu", threads=1, max_total_tokens=1024, progress=False)
    try:
        for step, _ in enumerate(llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))):
            if step == 3:
                llm.core.executor._workers[0].kill()
    except EngineDeadError as error:
        assert "stenograph-rank-1" in str(error) and "died" in str(error)
    else:
        raise AssertionError("nobody noticed")
    finally:
        llm.shutdown()
