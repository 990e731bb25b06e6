"""Tensor parallel: which share of a layer this rank holds, and how shares are put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stenograph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among the `size` ranks that share one model. With size 1 every operation is the identity."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, total: int, what: str) -> slice:
        """This rank's equal part of `total`; raises `ConfigError` where it doesn't divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} is {total}, which {self.size} ranks cannot share equally.",
                remedy=f"Set --tp-size to a divisor of {total}.",
            )
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather_last(self, x: Tensor) -> Tensor:
        """[..., n] on each rank -> [..., size * n] on all of them."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
