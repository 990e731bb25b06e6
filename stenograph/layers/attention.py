"""Self-attention over the paged KV cache: projections, optional QK-norm, rotary, the backend, output projection.

Shapes: T tokens, E hidden size, H query heads, G KV heads (both this rank's), D head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from stenograph.attention.base import AttentionPlan, AttentionSpec
from stenograph.config.facts import ModelFacts
from stenograph.layers.linear import Build, QKVLinear, RowParallelLinear
from stenograph.layers.norm import RMSNorm
from stenograph.layers.rotary import apply_rotary


class Attention(nn.Module):
    def __init__(self, build: Build, facts: ModelFacts, layer: int, *, norm_offset: float = 0.0) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(
            build,
            facts.hidden_size,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            bias=facts.qkv_bias,
        )
        self.o_proj = RowParallelLinear(build, facts.num_heads * facts.head_dim, facts.hidden_size, bias=facts.o_bias)
        self.q_norm = self.k_norm = None
        if facts.qk_norm:
            self.q_norm = RMSNorm(build, facts.head_dim, facts.rms_norm_eps, offset=norm_offset)
            self.k_norm = RMSNorm(build, facts.head_dim, facts.rms_norm_eps, offset=norm_offset)
        windowed = bool(facts.windowed_layers) and facts.windowed_layers[layer]
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=facts.head_dim,
            scale=facts.scale,
            window=facts.sliding_window if windowed else None,
            softcap=facts.attn_softcap,
        )

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        spec = self.spec
        qkv = self.qkv_proj.forward(x_TE).view(x_TE.shape[0], -1, spec.head_dim)
        heads = spec.num_heads + spec.num_kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            q_THD = apply_rotary(self.q_norm.forward(qkv[:, : spec.num_heads]), *rope)
            k_TGD = apply_rotary(self.k_norm.forward(qkv[:, spec.num_heads : heads]), *rope)
        else:
            rotated = apply_rotary(qkv[:, :heads], *rope)
            q_THD, k_TGD = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        out_THD = plan.attend(spec, q_THD, k_TGD, qkv[:, heads:])
        return self.o_proj.forward(out_THD.reshape(x_TE.shape[0], -1))
