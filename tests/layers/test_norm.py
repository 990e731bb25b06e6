"""The CPU's root-mean-square norm against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from stenograph.layers.linear import Build
from stenograph.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size_of_x", [0.0, 1e-3, 1.0, 1e4])
def test_against_float64(dtype: torch.dtype, given: torch.dtype, size_of_x: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(Build(device=torch.device("cpu"), dtype=dtype), 48, 1e-5, offset=1.0)
    assert norm.load_weight("", "weight", 0.3 * torch.randn(48))
    norm.finish()
    assert norm.weight is not None
    x = (size_of_x * torch.randn(5, 3, 48)).to(given)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    y = norm.forward(x)
    assert y.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 and given == torch.float32 else 2.0**-7
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=1e-12)
