"""The engine on a GPU, tiny models in fp32: the same tokens as transformers gives on the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stenograph import LLM, SamplingParams
from tests.tiny import ARCHITECTURES, VOCAB, greedy_reference, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_greedy_tokens_equal_transformers(architecture: str, page_size: int, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, architecture)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 3, 15, 16, 17, 33, 47, 70)]
    llm = LLM(
        str(tmp_path),
        device="cuda",
        dtype="float32",
        page_size=page_size,
        chunked_prefill_size=24,
        max_total_tokens=4096,
        progress=False,
    )
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    assert [a.outputs[0].token_ids for a in answers] == [greedy_reference(model, p, 48) for p in prompts]
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


def test_seeds_draw_the_same_tokens_as_on_the_cpu(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    params: Any = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, seed=5, max_tokens=32, repetition_penalty=1.1, logprobs=2
    )
    answers = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, dtype="float32", max_total_tokens=1024, progress=False)
        answers.append(llm.generate([[1, 2, 3], [7]], params))
    for a, b in zip(*answers, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert [lp.logprob for lp in a.outputs[0].logprobs] == pytest.approx(
            [lp.logprob for lp in b.outputs[0].logprobs], abs=1e-3
        )
