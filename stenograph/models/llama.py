"""Llama, SmolLM2, Mistral, Qwen 2, Qwen 2.5 and Qwen 3: pre-norm attention, pre-norm gated MLP.

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


class DecoderLayer(nn.Module):
    def __init__(self, build: Build, facts: ModelFacts, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, facts.hidden_size, facts.rms_norm_eps)
        self.self_attn = Attention(build, facts, index)
        self.post_attention_layernorm = RMSNorm(build, facts.hidden_size, facts.rms_norm_eps)
        self.mlp = GatedMLP(build, facts)

    def forward(
        self, x_TE: Tensor, rope: tuple[Tensor, Tensor], local_rope: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> Tensor:
        x_TE = x_TE + self.self_attn.forward(self.input_layernorm.forward(x_TE), rope, plan)
        return x_TE + self.mlp.forward(self.post_attention_layernorm.forward(x_TE))


class LlamaForCausalLM(CausalLM):
    def make_layer(self, index: int) -> nn.Module:
        return DecoderLayer(self.build, self.facts, index)
