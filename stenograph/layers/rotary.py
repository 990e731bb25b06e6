"""Rotary position embedding (Su et al., 2021) with the published ways to stretch it.

Shapes: T tokens, H heads, D head_dim, R rotated dimensions (D, or less for partial rotation).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stenograph.config.facts import RopeFacts
from stenograph.errors import ModelLoadError

SCALINGS = ("default", "dynamic", "linear", "llama3", "yarn")


def inverse_frequencies(facts: RopeFacts, rotated: int) -> tuple[Tensor, float]:
    """(inv_freq [R / 2] float32, factor on cos and sin) of one kind of layer.

    linear: Chen et al. 2023. llama3: Llama 3.1's model card. yarn: Peng et al. 2023. `dynamic` is plain RoPE up to the
    original context, which is where its context ends here. Raises `ModelLoadError` for any other type.
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    inv_freq = 1.0 / facts.theta**exponents
    raw = facts.raw
    if raw.get("freq_factors"):  # GGUF files of Llama 3 hold the divisors themselves
        return inv_freq / torch.tensor(raw["freq_factors"], dtype=torch.float32), 1.0
    if facts.type in ("default", "dynamic"):
        return inv_freq, 1.0
    if facts.type == "linear":
        return inv_freq / facts.factor, 1.0
    original = facts.original_context or 0
    if facts.type == "llama3":
        low, high = float(raw.get("low_freq_factor", 1.0)), float(raw.get("high_freq_factor", 4.0))
        wavelength = 2 * math.pi / inv_freq
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv_freq / facts.factor + smooth * inv_freq
        scaled = torch.where(wavelength > original / low, inv_freq / facts.factor, inv_freq)
        medium = (wavelength <= original / low) & (wavelength >= original / high)
        return torch.where(medium, blended, scaled), 1.0
    if facts.type == "yarn":
        return _yarn(facts, inv_freq, rotated, original)
    raise ModelLoadError(f"RoPE scaling {facts.type!r} is not supported.", remedy=f"Supported: {', '.join(SCALINGS)}.")


def _yarn(facts: RopeFacts, inv_freq: Tensor, rotated: int, original: int) -> tuple[Tensor, float]:
    raw = facts.raw

    def correction_dim(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(facts.theta))

    low, high = correction_dim(float(raw.get("beta_fast") or 32)), correction_dim(float(raw.get("beta_slow") or 1))
    if raw.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    extrapolated = 1 - ramp  # high frequencies stay as they are
    blended = inv_freq / facts.factor * (1 - extrapolated) + inv_freq * extrapolated

    def mscale(weight: float) -> float:
        return 1.0 if facts.factor <= 1 else 0.1 * weight * math.log(facts.factor) + 1.0

    attention_factor = raw.get("attention_factor")
    if attention_factor is None:
        if raw.get("mscale") and raw.get("mscale_all_dim"):
            attention_factor = mscale(float(raw["mscale"])) / mscale(float(raw["mscale_all_dim"]))
        else:
            attention_factor = mscale(1.0)
    return blended, float(attention_factor)


class Rotary:
    """cos and sin of every position up to the context length, gathered once a step for all layers alike."""

    def __init__(
        self, facts: RopeFacts, head_dim: int, context_length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rotated = int(head_dim * facts.partial)
        inv_freq, factor = inverse_frequencies(facts, self.rotated)
        angles = torch.arange(context_length, dtype=torch.float32).unsqueeze(1) * inv_freq  # [context, R / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        # [context, 2, R]: cos | cos, then -sin | sin, so that rotate(x) = x * cos + swap_halves(x) * sin
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        self.table = table.to(device, dtype)

    def gather(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_T1R, sin_T1R) for `apply_rotary`."""
        rows = self.table.index_select(0, positions_T)
        return rows[:, 0].unsqueeze(1), rows[:, 1].unsqueeze(1)


def apply_rotary(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotates the first R of D dimensions, halves paired (dimension i with i + R / 2)."""
    rotated = cos_T1R.shape[-1]
    if rotated < x_THD.shape[-1]:
        head, tail = x_THD[..., :rotated], x_THD[..., rotated:]
        return torch.cat([apply_rotary(head, cos_T1R, sin_T1R), tail], dim=-1)
    return torch.addcmul(x_THD * cos_T1R, x_THD.roll(rotated // 2, -1), sin_T1R)
