"""Linear layers: fused parts, split over tensor-parallel ranks, weights dense or packed.

Shapes: T tokens, K input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stenograph.distributed.tensor_parallel import TensorParallel
from stenograph.layers.prepacked import PrepackedLinear, can_prepack
from stenograph.layers.quantized import PackedLinear, QuantizedTensor, cat_rows, pack

Weight = Tensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer needs to know to make its weights: where, in which dtype, and which share; and whether packed
    weights keep a dense copy beside them."""

    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel = TensorParallel()
    dense_copies: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of a fused layer: this rank's rows of the `total` that the checkpoint holds."""

    name: str
    total: int
    rows: slice

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start


class Linear(nn.Module):
    """y_TN = x_TK W_NK^T + b_N, W being this rank's rows of each part, stacked (and its columns, if `cols` says so).

    The weight comes part by part through `load_weight`; once all parts are there they become one matrix: packed, where
    every part is quantised in a way that this device multiplies directly, else dense in the build's dtype.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self, build: Build, in_features: int, parts: list[Part], *, bias: bool, cols: slice | None = None
    ) -> None:
        super().__init__()
        self.build = build
        self.full_in_features = in_features
        self.cols = cols
        self.in_features = in_features if cols is None else cols.stop - cols.start
        self.parts = {part.name: part for part in parts}
        self.out_features = sum(part.size for part in parts)
        self.has_bias = bias
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.packed: PackedLinear | PrepackedLinear | None = None  # instead of `weight`, on a CPU
        self._arrived: dict[tuple[str, str], Weight] = {}

    # -- weights

    def load_weight(self, part: str, kind: str, value: Weight) -> bool:
        """Takes one part's "weight" or "bias". False where this layer has no such thing."""
        spec = self.parts.get(part)
        if spec is None or kind not in ("weight", "bias") or (kind == "bias" and not self.has_bias):
            return False
        want = (spec.total, self.full_in_features) if kind == "weight" else (spec.total,)
        check_shape(value, want)
        self._arrived[part, kind] = self._share(spec, kind, value)
        if all((name, "weight") in self._arrived for name in self.parts) and not (
            self.has_bias and any((name, "bias") not in self._arrived for name in self.parts)
        ):
            self._assemble()
        return True

    def _share(self, part: Part, kind: str, value: Weight) -> Weight:
        whole_rows = part.size == part.total
        if isinstance(value, QuantizedTensor):
            if not whole_rows:
                value = value.rows(part.rows.start, part.rows.stop)
            if self.cols is not None and self.cols != slice(0, self.full_in_features):
                aligned = value.cols(self.cols.start, self.cols.stop)
                value = value.dequantize(torch.float32)[:, self.cols] if aligned is None else aligned
            return value
        value = value[part.rows]
        if kind == "weight" and self.cols is not None:
            value = value[:, self.cols]
        return value

    def _assemble(self) -> None:
        weights = [self._arrived.pop((name, "weight")) for name in self.parts]
        if self.has_bias:
            biases = [self._arrived.pop((name, "bias")) for name in self.parts]
            self.bias = self._parameter(torch.cat([dense(b, self.build.dtype) for b in biases]))
        quantized = [w for w in weights if isinstance(w, QuantizedTensor)]
        if (
            len(quantized) == len(weights)
            and len({w.qtype for w in quantized}) == 1
            and self.build.device.type == "cpu"
        ):
            self.packed = pack(cat_rows(quantized), self.build.dtype, keep_dense=self.build.dense_copies)
        if self.packed is None:
            self.weight = self._parameter(torch.cat([dense(w, self.build.dtype) for w in weights]))
            self.prepack()

    def prepack(self) -> None:
        """Moves a dense weight to the CPU's fast layout, where there is one."""
        if self.weight is not None and can_prepack(self.build.dtype, self.build.device):
            self.packed, self.weight = PrepackedLinear(self.weight), None

    def _parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(self.build.device, self.build.dtype), requires_grad=False)

    def allocate(self) -> None:
        """Uninitialised dense weights, for dummy loading."""
        like: dict[str, Any] = {"device": self.build.device, "dtype": self.build.dtype}
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **like), requires_grad=False)
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, **like), requires_grad=False)

    def missing(self) -> list[tuple[str, str]]:
        """(part, kind) of everything that hasn't come."""
        if self.weight is not None or self.packed is not None:
            return []
        kinds = ("weight", "bias") if self.has_bias else ("weight",)
        return [(name, kind) for name in self.parts for kind in kinds if (name, kind) not in self._arrived]

    # -- use

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.packed is not None:
            y_TN = self.packed(x_TK)
            return y_TN if self.bias is None else y_TN.add_(self.bias)
        assert self.weight is not None
        return F.linear(x_TK, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Each rank computes its share of the outputs of every part."""

    def __init__(self, build: Build, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        shares = [Part(name, total, build.tp.share(total, f"the width of {name}")) for name, total in parts.items()]
        super().__init__(build, in_features, shares, bias=bias)


class QKVLinear(Linear):
    """Queries, keys and values in one product. Heads are shared out; KV heads are repeated where
    there are fewer than ranks."""

    def __init__(
        self, build: Build, in_features: int, *, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool
    ) -> None:
        tp = build.tp
        heads = tp.share(num_heads, "the number of attention heads")
        if num_kv_heads >= tp.size:
            kv = tp.share(num_kv_heads, "the number of key-value heads")
        else:
            TensorParallel(size=num_kv_heads).share(tp.size, "--tp-size")  # every head repeated equally often
            head = tp.rank * num_kv_heads // tp.size
            kv = slice(head, head + 1)
        self.num_heads = heads.stop - heads.start
        self.num_kv_heads = kv.stop - kv.start
        q_rows = slice(heads.start * head_dim, heads.stop * head_dim)
        kv_rows = slice(kv.start * head_dim, kv.stop * head_dim)
        super().__init__(
            build,
            in_features,
            [
                Part("q", num_heads * head_dim, q_rows),
                Part("k", num_kv_heads * head_dim, kv_rows),
                Part("v", num_kv_heads * head_dim, kv_rows),
            ],
            bias=bias,
        )


class RowParallelLinear(Linear):
    """Each rank multiplies its share of the inputs; the results are summed over ranks."""

    def __init__(self, build: Build, in_features: int, out_features: int, *, bias: bool = False) -> None:
        cols = build.tp.share(in_features, "the number of input features")
        super().__init__(build, in_features, [Part("", out_features, slice(0, out_features))], bias=bias, cols=cols)

    def forward(self, x_TK: Tensor) -> Tensor:
        tp = self.build.tp
        if tp.size == 1:
            return super().forward(x_TK)
        assert self.weight is not None or self.packed is not None
        y_TN = self.packed(x_TK) if self.packed is not None else F.linear(x_TK, self.weight)  # type: ignore[arg-type]
        y_TN = tp.all_reduce(y_TN)
        return y_TN if self.bias is None else y_TN + self.bias  # once, after the sum


def check_shape(value: Weight, want: tuple[int, ...]) -> None:
    """Raises `ValueError`, to be prefixed with the weight's name."""
    if tuple(value.shape) != want:
        raise ValueError(f"has shape {tuple(value.shape)}, but the configuration asks for {want}")


def dense(value: Weight, dtype: torch.dtype) -> Tensor:
    return value.dequantize(dtype) if isinstance(value, QuantizedTensor) else value.to(dtype)
