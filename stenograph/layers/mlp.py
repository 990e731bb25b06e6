"""The gated feed-forward block: down(act(gate(x)) * up(x)).

Shapes: T tokens, E hidden size, F intermediate size (this rank's).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stenograph.config.facts import ModelFacts
from stenograph.errors import ModelLoadError
from stenograph.layers.linear import Build, ColumnParallelLinear, RowParallelLinear

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    def __init__(self, build: Build, facts: ModelFacts) -> None:
        super().__init__()
        if facts.activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"The activation {facts.activation!r} is not supported.", remedy=f"Supported: {', '.join(ACTIVATIONS)}."
            )
        size = facts.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            build, facts.hidden_size, {"gate": size, "up": size}, bias=facts.mlp_bias
        )
        self.down_proj = RowParallelLinear(build, size, facts.hidden_size, bias=facts.mlp_bias)
        self.activation = ACTIVATIONS[facts.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up_proj.forward(x_TE).chunk(2, dim=-1)
        return self.down_proj.forward(self.activation(gate_TF).mul_(up_TF))
