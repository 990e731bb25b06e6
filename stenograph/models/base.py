"""What every architecture shares: weights by their checkpoint names, the step's forward, logits.

Shapes: T tokens, N rows that need logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stenograph.attention.base import AttentionPlan
from stenograph.config.facts import ModelFacts, RopeFacts
from stenograph.layers.embedding import LMHead, VocabEmbedding
from stenograph.layers.linear import Build, Linear, Weight
from stenograph.layers.norm import RMSNorm
from stenograph.layers.rotary import Rotary

FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
"""Checkpoint module -> our fused module and the part of it."""
UNFUSED = {target: source for source, target in FUSED.items()}


class CausalLM(nn.Module):
    """A decoder-only language model; subclasses fill `model.layers`.

    Module names are the checkpoint's (Hugging Face layout), but for the fused projections of `FUSED`.
    """

    EMBEDDING_SCALE = False  # Gemma multiplies embeddings by sqrt(hidden size)
    NORM_OFFSET = 0.0  # Gemma stores norm weights less one

    def __init__(self, build: Build, facts: ModelFacts, context_length: int) -> None:
        super().__init__()
        self.build, self.facts = build, facts
        self.model = nn.Module()
        scale = facts.hidden_size**0.5 if self.EMBEDDING_SCALE else 1.0
        self.embed = VocabEmbedding(build, facts.vocab_size, facts.hidden_size, scale=scale)
        self.layers = nn.ModuleList([self.make_layer(i) for i in range(facts.num_layers)])
        self.norm = self.make_norm()
        self.lm_head = LMHead(build, self.embed, tied=facts.tie_embeddings, softcap=facts.logit_softcap)
        self.model.embed_tokens, self.model.layers, self.model.norm = self.embed, self.layers, self.norm
        self.rotary = self._rotary(facts.rope, context_length)
        self.local_rotary = None if facts.local_rope is None else self._rotary(facts.local_rope, context_length)
        self._loaders = {name: module for name, module in self.named_modules() if hasattr(module, "missing")}

    def make_layer(self, index: int) -> nn.Module:
        raise NotImplementedError

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.build, self.facts.hidden_size, self.facts.rms_norm_eps, offset=self.NORM_OFFSET)

    def _rotary(self, rope: RopeFacts, context_length: int) -> Rotary:
        head_dim = self.facts.head_dim
        return Rotary(rope, head_dim, context_length, device=self.build.device, dtype=self.build.dtype)

    # -- weights

    def load_weight(self, name: str, value: Weight) -> bool:
        """Puts one checkpoint tensor where it belongs. False for a name that this model doesn't have.

        Raises `ValueError` saying which shape came and which was expected.
        """
        *path, kind = name.split(".")
        part = ""
        if path and path[-1] in FUSED:
            path[-1], part = FUSED[path[-1]]
        module = self._loaders.get(".".join(path))
        return module is not None and module.load_weight(part, kind, value)

    def missing_weights(self) -> list[str]:
        """Checkpoint names that haven't come."""
        names = []
        for path, module in self._loaders.items():
            for part, kind in module.missing():
                *parents, last = path.split(".")
                names.append(".".join([*parents, UNFUSED.get((last, part), last), kind]))
        return names

    def allocate_weights(self) -> None:
        """Uninitialised weights on the device (norms are ones), for dummy loading."""
        for module in self._loaders.values():
            module.allocate()

    def finish_loading(self) -> None:
        """After the last `load_weight` (or dummy filling)."""
        self.lm_head.finish(self.embed)
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepack()
            elif isinstance(module, RMSNorm):
                module.finish()
        self.eval()
        for module in self.modules():
            # Found as plain attributes, these cost nothing to look up; through nn.Module.__getattr__ the look-ups of
            # one step of a small model on a CPU take half a millisecond. Assigning anew removes the plain attribute.
            vars(module).update(module._modules)
            vars(module).update(module._parameters)

    def weight_bytes(self) -> int:
        """Bytes that the weights take on this rank, packed ones included."""
        dense = {t.data_ptr(): t.numel() * t.element_size() for t in self.parameters()}
        packed = [m.packed for m in self.modules() if isinstance(m, Linear | LMHead) and m.packed is not None]
        return sum(dense.values()) + sum(p.num_bytes for p in packed)

    def step_weight_bytes(self, num_tokens: int) -> int:
        """Bytes of weights that a step over `num_tokens` tokens reads, the embedding's few rows left out."""
        matrices = [m for m in self.modules() if isinstance(m, Linear | LMHead)]
        total = 0
        for matrix in matrices:
            if matrix.packed is not None:
                total += matrix.packed.bytes_read(num_tokens)
            elif matrix.weight is not None:
                total += matrix.weight.numel() * matrix.weight.element_size()
        return total

    # -- use

    def forward(self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [T, E] after the last norm."""
        rope = self.rotary.gather(positions_T)
        local_rope = rope if self.local_rotary is None else self.local_rotary.gather(positions_T)
        x_TE = self.embed.forward(ids_T)
        if x_TE.device.type == "cpu":
            x_TE = x_TE.float()  # a float32 residual is the faster one there: its norms need no conversion
        for layer in self.layers:
            x_TE = layer.forward(x_TE, rope, local_rope, plan)
        return self.norm.forward(x_TE)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N, V]."""
        return self.lm_head.forward(hidden_NE)


def dtype_of(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16"""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
