"""Packed GGUF weights against float64 products of the dequantised ones."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stenograph.layers.quantized import MAX_PACKED_TOKENS, PackedLinear, QuantizedTensor, cat_rows, pack

BF16_STEP = 2.0**-8
PACKABLE = ("Q4_0", "Q4_1", "Q8_0")
packs = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), reason="this torch has no packed kernel"
)


def quantized(qtype: str, rows: int = 96, cols: int = 128, *, seed: int = 0) -> QuantizedTensor:
    values = np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType[qtype])
    return QuantizedTensor(qtype, torch.from_numpy(data), (rows, cols))


def packed(weight: QuantizedTensor, *, keep_dense: bool = True) -> PackedLinear:
    found = pack(weight, torch.bfloat16, keep_dense=keep_dense)
    assert found is not None
    return found


@pytest.mark.parametrize("qtype", PACKABLE)
def test_cuts_and_joins_at_blocks(qtype: str) -> None:
    weight = quantized(qtype)
    whole = weight.dequantize(torch.float32)
    assert torch.equal(weight.rows(8, 24).dequantize(torch.float32), whole[8:24])
    middle = weight.cols(32, 96)
    assert middle is not None and middle.shape == (96, 64)
    assert torch.equal(middle.dequantize(torch.float32), whole[:, 32:96])
    assert weight.cols(0, 40) is None and weight.cols(16, 48) is None
    joined = cat_rows([weight.rows(0, 8), weight.rows(50, 60)])
    assert torch.equal(joined.dequantize(torch.float32), torch.cat([whole[:8], whole[50:60]]))


@packs
@pytest.mark.parametrize("qtype", PACKABLE)
@pytest.mark.parametrize("tokens", [1, 2, MAX_PACKED_TOKENS // 2 + 1, MAX_PACKED_TOKENS, MAX_PACKED_TOKENS + 1, 40])
@pytest.mark.parametrize("keep_dense", [True, False])
def test_products_have_bfloat16s_accuracy(qtype: str, tokens: int, keep_dense: bool) -> None:
    """No worse than the dequantised bfloat16 model: scales or weights rounded once, the result once."""
    weight = quantized(qtype)
    exact = weight.dequantize(torch.float64)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    want = x.double() @ exact.t()
    plain = (x.float() @ weight.dequantize(torch.bfloat16).float().t()).bfloat16()
    error = lambda y: ((y.double() - want).norm() / want.norm()).item()  # noqa: E731
    y = packed(weight, keep_dense=keep_dense)(x)
    assert y.dtype == torch.bfloat16 and y.shape == (tokens, 96)
    assert error(y) < max(1.6 * error(plain), BF16_STEP / 2)


@packs
@pytest.mark.parametrize("qtype,levels", [("Q4_0", 16), ("Q4_1", 16), ("Q8_0", 256)])
def test_every_quantised_number_is_kept(qtype: str, levels: int) -> None:
    """With scales that bfloat16 holds, packed products of single weights are exactly those weights."""
    rows, cols = 64, 256
    q = torch.arange(rows * cols).view(rows, cols) % levels
    blocks = q.view(rows, -1, 32)
    scale = torch.full((rows, blocks.shape[1], 1), 0.5, dtype=torch.float16).view(torch.uint8)
    minimum = torch.full((rows, blocks.shape[1], 1), -2.0, dtype=torch.float16).view(torch.uint8)
    if qtype == "Q8_0":
        data = torch.cat([scale, (blocks - 128).to(torch.int8).view(torch.uint8)], -1)
    else:
        nibbles = (blocks[..., :16] | blocks[..., 16:] << 4).to(torch.uint8)
        data = torch.cat([scale, minimum, nibbles] if qtype == "Q4_1" else [scale, nibbles], -1)
    weight = QuantizedTensor(qtype, data.flatten(1).contiguous(), (rows, cols))
    exact = weight.dequantize(torch.float32)
    assert exact.unique().numel() == levels
    multiply = packed(weight, keep_dense=False)
    seen = torch.stack([multiply(row.unsqueeze(0)).squeeze(0) for row in torch.eye(cols).bfloat16()], dim=1)
    assert torch.equal(seen.float(), exact)


@packs
def test_what_cannot_be_packed() -> None:
    assert pack(quantized("Q4_1"), torch.float32) is None
    assert pack(quantized("Q4_1", rows=24), torch.bfloat16) is None
    assert pack(quantized("Q5_1"), torch.bfloat16) is None


@packs
def test_bytes() -> None:
    weight = quantized("Q4_1", rows=64, cols=256)
    bare, both = packed(weight, keep_dense=False), packed(weight)
    nibbles, scales = 64 * 256 // 2, 64 * (256 // 32) * 4
    assert bare.num_bytes == bare.bytes_read(1) == bare.bytes_read(1000) == nibbles + scales
    if both.dense is not None:
        assert both.num_bytes == bare.num_bytes + 2 * 64 * 256
        assert both.bytes_read(MAX_PACKED_TOKENS) == bare.num_bytes and both.bytes_read(1000) == 2 * 64 * 256
