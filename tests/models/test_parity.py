"""Every architecture against transformers, fp32, tiny random weights: logits within 1e-4, greedy tokens identical."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stenograph import LLM, SamplingParams
from stenograph.executor.step import Step, StepRow
from tests.tiny import ARCHITECTURES, VOCAB, greedy_reference, save_tiny

LENGTHS = (1, 3, 15, 16, 17, 33, 47, 70)  # inside and at the edges of pages of 16 and of chunks of 24


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: Any, tmp_path_factory: Any) -> tuple[Path, Any, list[list[int]], list[list[int]]]:
    directory = tmp_path_factory.mktemp(request.param)
    model = save_tiny(directory, request.param)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    return directory, model, prompts, [greedy_reference(model, p, 64) for p in prompts]


def engine(directory: Path, **options: Any) -> LLM:
    base = {"dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "threads": 1, "progress": False}
    return LLM(str(directory), **{**base, **options})


@pytest.mark.parametrize("page_size,chunk", [(1, 24), (16, 24), (16, 16), (64, 512)])
def test_greedy_tokens_equal_transformers(tiny: Any, page_size: int, chunk: int) -> None:
    directory, _, prompts, expected = tiny
    llm = engine(directory, page_size=page_size, chunked_prefill_size=chunk)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    assert together == expected
    alone = [llm.generate([prompts[i]], params)[0].outputs[0].token_ids for i in (3, 7)]
    assert alone == [expected[3], expected[7]]
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_logits_equal_transformers(tiny: Any, page_size: int) -> None:
    """Prefill in one go, in chunks that end inside and at the edge of a page, and token by token."""
    directory, model, prompts, _ = tiny
    ids = prompts[-1]
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    executor = engine(directory, page_size=page_size).core.executor
    pages = list(range(1, 2 + len(ids) // page_size))
    for cuts in ([len(ids)], [16, 32, 40, 64, 70], [5, 6, 7, 33, 70], [66, 67, 68, 69, 70]):
        start, logits = 0, []
        for stop in cuts:
            row = StepRow(token_ids=ids[start:stop], start=start, pages=pages, sampling=None)
            with torch.inference_mode():
                step = Step(rows=[row], num_decode=int(stop - start == 1))
                logits.append(executor.model.logits(executor._forward(executor.backend, step)))
            start = stop
        torch.testing.assert_close(torch.cat(logits), reference, atol=1e-4, rtol=0)
