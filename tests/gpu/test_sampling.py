"""The sampler on a GPU: the same tokens as on the CPU, where plain formulas check it (tests/sampling)."""

from __future__ import annotations

import random

import pytest
import torch

from stenograph.sampling.params import SamplingParams
from stenograph.sampling.sampler import SamplerOutput, SamplingBatch, SamplingRow, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB = 151_936
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=3.0, top_p=0.99),  # its cut lies beyond the candidates looked at first
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.9, frequency_penalty=0.7, logit_bias={5: 8.0, 9: -100.0}, logprobs=0),
]


def make_rows(count: int) -> list[SamplingRow]:
    rng = random.Random(0)
    return [
        SamplingRow(
            params=KINDS[i % len(KINDS)],
            seed=rng.getrandbits(63),
            position=rng.randrange(4096),
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(30)],
            output_token_ids=[rng.randrange(200) for _ in range(30)],
            masked_token_ids=(0, 1) if i % 4 == 0 else (),
        )
        for i in range(count)
    ]


def on(device: str, logits_NV: torch.Tensor, rows: list[SamplingRow]) -> SamplerOutput:
    return sample(logits_NV.to(device, copy=True), SamplingBatch.build(rows))


def test_tokens_and_logprobs_are_those_of_the_cpu() -> None:
    rows = make_rows(360)
    logits_NV = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    gpu, cpu = on("cuda", logits_NV, rows), on("cpu", logits_NV, rows)
    assert gpu.nan_rows == cpu.nan_rows == []
    pairs = list(zip(rows, gpu.token_ids.tolist(), cpu.token_ids.tolist(), strict=True))
    assert all(ours == theirs for row, ours, theirs in pairs if row.params.greedy)
    # exp and sums are rounded differently: a uniform number on the very edge of a token may fall to its neighbour
    assert sum(ours != theirs for _, ours, theirs in pairs) <= 2
    assert gpu.logprobs is not None and cpu.logprobs is not None
    for ours, theirs in zip(gpu.logprobs, cpu.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None and ours.token_id == theirs.token_id:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4) and ours.rank == theirs.rank
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


def test_a_row_is_the_same_alone_and_in_any_company() -> None:
    rows = make_rows(64)
    logits_NV = (torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(2)) * 3).cuda()
    together = on("cuda", logits_NV, rows).token_ids.tolist()
    alone = [on("cuda", logits_NV[i : i + 1], [row]).token_ids.item() for i, row in enumerate(rows)]
    backwards = on("cuda", logits_NV.flip(0), rows[::-1]).token_ids.tolist()[::-1]
    assert together == alone == backwards


def test_poisoned_rows_are_flagged_alone() -> None:
    rows = make_rows(18)
    logits_NV = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(3))
    clean = on("cuda", logits_NV, rows).token_ids.tolist()
    logits_NV[2, 77] = torch.nan
    logits_NV[3] = -torch.inf
    logits_NV[4, 0] = torch.inf
    logits_NV[12, 100:] = -torch.inf
    out = on("cuda", logits_NV, rows)
    assert out.nan_rows == [2, 3, 4]
    assert out.token_ids[12] < 100
    tokens = out.token_ids.tolist()
    assert all(tokens[i] == clean[i] for i in range(len(rows)) if i not in (2, 3, 4, 12))


def test_nothing_outside_the_allowed_set_is_ever_drawn() -> None:
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    best = set(logits_V.topk(7).indices.tolist())
    rows = [SamplingRow(params=SamplingParams(temperature=5.0, top_k=7), seed=1, position=i) for i in range(4000)]
    drawn = on("cuda", logits_V.expand(len(rows), -1), rows).token_ids.tolist()
    assert set(drawn) == best
