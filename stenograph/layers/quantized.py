"""Quantised weights as a GGUF file holds them, and the CPU kernels that multiply them without unpacking.

Shapes: T tokens, K input features, N output features, B blocks of 32 weights along K.

torch multiplies 4-bit weights in groups of 32 on the CPU, at speed in bfloat16 alone (`_weight_int4pack_mm_for_cpu`):
w = (q - 8) * scale + zero, with q in 0..15. The block formats fit it with every quantised number kept as it is:
    Q4_0  w = d * (q - 8)                            scale d, zero 0
    Q4_1  w = d * q + m                              scale d, zero m + 8 d
    Q8_0  w = d * q = d * (16 high + low)            high + 8 with scale 16 d, beside low with scale d and zero 8 d:
                                                     one product of twice the width, x written twice
Only the scales are rounded, to the kernel's bfloat16: the result equals the dequantised bfloat16 model to bfloat16's
accuracy. In any other dtype the weights are dequantised, exactly in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stenograph.layers.prepacked import PrepackedLinear, can_prepack

BLOCK = 32  # weights a block of the packable types
PACKABLE = ("Q4_0", "Q4_1", "Q8_0")
MAX_PACKED_TOKENS = 8
"""Above this the 4-bit kernel, whose time grows with every token, falls behind a dense bfloat16 product (cold weights,
576 x 576 ... 3072 x 576, two AVX-512 cores: level at 8 tokens, 1.3 times as slow at 16, twice as slow at 32). Half as
many for Q8_0, which takes two numbers a weight."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in a GGUF block format.

    qtype  the format's name ("Q4_1", "Q6_K", ...)
    data   uint8 [rows, bytes a row]
    shape  (rows, cols) in weights
    """

    qtype: str
    data: Tensor
    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[rows, cols]; computed in float32 by the gguf package."""
        import gguf

        values = gguf.dequantize(self.data.numpy(), gguf.GGMLQuantizationType[self.qtype])
        return torch.from_numpy(values).view(self.shape).to(dtype)

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        return QuantizedTensor(self.qtype, self.data[start:stop], (stop - start, self.shape[1]))

    def cols(self, start: int, stop: int) -> QuantizedTensor | None:
        """None where the cut isn't at the edge of a block."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.qtype]]
        if start % block or stop % block:
            return None
        data = self.data[:, start // block * size : stop // block * size].contiguous()
        return QuantizedTensor(self.qtype, data, (self.shape[0], stop - start))


def cat_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stacks matrices of one format and width."""
    assert len({(p.qtype, p.shape[1]) for p in parts}) == 1
    if len(parts) == 1:
        return parts[0]
    rows = sum(p.shape[0] for p in parts)
    return QuantizedTensor(parts[0].qtype, torch.cat([p.data for p in parts]), (rows, parts[0].shape[1]))


class PackedLinear:
    """y_TN = x_TK W^T for bfloat16 x: from packed weights for few tokens, from a dense copy for many.

    The copy takes 2 bytes a weight; without it (`dense` None) the packed weights serve any number of tokens.
    """

    def __init__(
        self, weights: Tensor, scales: Tensor, shape: tuple[int, int], *, planes: int, dense: PrepackedLinear | None
    ) -> None:
        self.weights, self.scales, self.shape, self.planes, self.dense = weights, scales, shape, planes, dense
        self.most_packed = MAX_PACKED_TOKENS // planes
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @property
    def num_bytes(self) -> int:
        packed = sum(t.numel() * t.element_size() for t in (self.weights, self.scales))
        return packed + (0 if self.dense is None else self.dense.num_bytes)

    def bytes_read(self, num_tokens: int) -> int:
        """By a product with so many rows."""
        if self.dense is not None and num_tokens > self.most_packed:
            return self.dense.num_bytes
        return self.num_bytes - (0 if self.dense is None else self.dense.num_bytes)

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self.dense is not None and x_TK.shape[0] > self.most_packed:
            return self.dense(x_TK)
        if self.planes > 1:
            x_TK = torch.cat([x_TK] * self.planes, dim=-1)
        y_TN: Tensor = self._multiply(x_TK, self.weights, BLOCK, self.scales)
        return y_TN


def pack(weight: QuantizedTensor, dtype: torch.dtype, *, keep_dense: bool = True) -> PackedLinear | None:
    """The weight in the CPU kernel's layout; None where torch has no kernel for its format, dtype or shape."""
    rows, cols = weight.shape
    if dtype != torch.bfloat16 or weight.qtype not in PACKABLE or rows % 16 or cols % BLOCK:
        return None
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    blocks_NBX = weight.data.view(rows, cols // BLOCK, -1)
    scale_NB = blocks_NBX[..., :2].contiguous().view(torch.float16).float().squeeze(-1)
    planes = 1
    if weight.qtype == "Q8_0":
        q_NK = blocks_NBX[..., 2:].contiguous().view(torch.int8).to(torch.int32).view(rows, cols)
        q_NK = torch.cat([(q_NK >> 4) + 8, q_NK & 15], dim=1)
        zero_NB = torch.cat([torch.zeros_like(scale_NB), 8 * scale_NB], dim=1)
        scale_NB = torch.cat([16 * scale_NB, scale_NB], dim=1)
        planes = 2
    else:
        header = 2 if weight.qtype == "Q4_0" else 4
        nibbles = blocks_NBX[..., header:]  # byte i of a block: weight i low, weight i + 16 high
        q_NK = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).to(torch.int32).view(rows, cols)
        zero_NB = torch.zeros_like(scale_NB)
        if weight.qtype == "Q4_1":
            zero_NB = blocks_NBX[..., 2:4].contiguous().view(torch.float16).float().squeeze(-1) + 8 * scale_NB
    weights = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK.contiguous(), 1)
    scales = torch.stack([scale_NB.t(), zero_NB.t()], dim=-1).to(torch.bfloat16).contiguous()  # [B, N, 2]
    copy = keep_dense and can_prepack(dtype, weight.data.device)
    dense = PrepackedLinear(weight.dequantize(dtype)) if copy else None
    return PackedLinear(weights, scales, weight.shape, planes=planes, dense=dense)
