"""Random weights of a configuration's shapes, for trying a model's speed without its checkpoint."""

from __future__ import annotations

import zlib
from typing import Any

import torch

EMBEDDING_STD = 0.02


def fill_with_random_weights(model: Any, rank: int = 0) -> None:
    """Allocates and fills on the device: matrices with std 1 / sqrt(inputs), so that activations keep their size.

    The same names give the same numbers in every run; each rank's share of a matrix differs, biases and norms don't.
    """
    model.allocate_weights()
    seen: set[int] = set()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() in seen or (parameter.dim() == 1 and "norm" in name):
                continue
            seen.add(parameter.data_ptr())
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(name.encode()) + (rank if parameter.dim() > 1 else 0))
            std = EMBEDDING_STD if parameter.dim() == 1 or "embed" in name else parameter.shape[-1] ** -0.5
            parameter.normal_(std=std, generator=generator)
