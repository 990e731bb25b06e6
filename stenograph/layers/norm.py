"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stenograph.layers.linear import Build, Weight, check_shape, dense


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. Gemma's checkpoints hold weight - 1: `offset` 1 adds it at load."""

    weight: Tensor | None

    def __init__(self, build: Build, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.build, self.size, self.eps, self.offset = build, size, eps, offset
        self.shape = (size,)
        self.register_parameter("weight", None)
        self._scaled: Tensor | None = None  # float32 weight * sqrt(size), on a CPU
        self._floor = torch.tensor([(size * eps) ** 0.5])

    def load_weight(self, part: str, kind: str, value: Weight) -> bool:
        if part or kind != "weight":
            return False
        check_shape(value, self.shape)
        weight = dense(value, torch.float32) + self.offset
        self.weight = nn.Parameter(weight.to(self.build.device, self.build.dtype), requires_grad=False)
        return True

    def allocate(self) -> None:
        weight = torch.ones(self.size, device=self.build.device, dtype=self.build.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def missing(self) -> list[tuple[str, str]]:
        return [] if self.weight is not None else [("", "weight")]

    def finish(self) -> None:
        """After loading."""
        if self.build.device.type == "cpu" and self.weight is not None:
            self._scaled = self.weight.float() * self.size**0.5

    def forward(self, x: Tensor) -> Tensor:
        """In the build's dtype, whatever x has."""
        if self._scaled is not None:
            # x * w / sqrt(mean(x^2) + eps) = x * w * sqrt(size) / hypot(|x|, sqrt(size * eps)): five small kernels,
            # half the time of the CPU's rms_norm, which is ten.
            length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
            return torch.div(x * self._scaled, torch.hypot(length, self._floor)).to(self.build.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)
