"""Gemma 3 (text): norms before and after each block, QK-norm, five windowed layers to each full one, two rotary bases.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from stenograph.attention.base import AttentionPlan
from stenograph.config.facts import ModelFacts
from stenograph.layers.attention import Attention
from stenograph.layers.linear import Build
from stenograph.layers.mlp import GatedMLP
from stenograph.layers.norm import RMSNorm
from stenograph.models.base import CausalLM


class Gemma3DecoderLayer(nn.Module):
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __init__(self, build: Build, facts: ModelFacts, index: int) -> None:
        super().__init__()
        self.windowed = facts.windowed_layers[index]
        self.self_attn = Attention(build, facts, index, norm_offset=1.0)
        self.mlp = GatedMLP(build, facts)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            setattr(self, name, RMSNorm(build, facts.hidden_size, facts.rms_norm_eps, offset=1.0))

    def forward(
        self, x_TE: Tensor, rope: tuple[Tensor, Tensor], local_rope: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> Tensor:
        attended_TE = self.self_attn.forward(
            self.input_layernorm.forward(x_TE), local_rope if self.windowed else rope, plan
        )
        x_TE = x_TE + self.post_attention_layernorm.forward(attended_TE)
        fed_TE = self.mlp.forward(self.pre_feedforward_layernorm.forward(x_TE))
        return x_TE + self.post_feedforward_layernorm.forward(fed_TE)


class Gemma3ForCausalLM(CausalLM):
    EMBEDDING_SCALE = True
    NORM_OFFSET = 1.0

    def make_layer(self, index: int) -> nn.Module:
        return Gemma3DecoderLayer(self.build, self.facts, index)
