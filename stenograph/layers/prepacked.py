"""Dense bfloat16 weights in the blocked layout that oneDNN multiplies fastest on a CPU.

Laid out once at load; a plain product would read the row-major matrix at about half the speed (cold weights, two
AVX-512 cores, 16 tokens by 3072 x 576: 120 us against 177 us).

Shapes: T tokens, K input features, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPICAL_TOKENS = 16  # the layout is chosen for this many rows; others are as fast


class PrepackedLinear:
    """y_TN = x_TK W_NK^T for bfloat16 x on the CPU."""

    def __init__(self, weight_NK: Tensor) -> None:
        assert weight_NK.dtype == torch.bfloat16 and weight_NK.device.type == "cpu"
        self.shape = (weight_NK.shape[0], weight_NK.shape[1])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), TYPICAL_TOKENS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def num_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]

    def bytes_read(self, num_tokens: int) -> int:
        return self.num_bytes

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN: Tensor = self._multiply(x_TK, self._weight, None, "none", [], "")
        return y_TN


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this processor multiply bfloat16 through oneDNN."""
    return (
        dtype == torch.bfloat16
        and device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
