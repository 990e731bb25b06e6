"""The CPU's block-wise maximum finds what `max` finds."""

from __future__ import annotations

import pytest
import torch

from stenograph.sampling.sampler import BLOCK, _maximum


@pytest.mark.parametrize("vocab", [BLOCK, 10 * BLOCK, 10 * BLOCK + 1])
def test_the_first_of_equal_maxima(vocab: int) -> None:
    logits_NV = torch.randint(-4, 4, (64, vocab), generator=torch.Generator().manual_seed(0)).float()
    top_N, index_N = _maximum(logits_NV)
    want = logits_NV.max(dim=-1)
    assert torch.equal(top_N, want.values) and torch.equal(index_N, want.indices)


def test_rows_without_a_number_show_it() -> None:
    logits_NV = torch.zeros(3, 4 * BLOCK)
    logits_NV[0, 200] = torch.nan
    logits_NV[1] = -torch.inf
    logits_NV[2, 300] = torch.inf
    top_N, index_N = _maximum(logits_NV)
    assert top_N.isfinite().tolist() == [False, False, False] and top_N[0].isnan() and index_N[2] == 300
