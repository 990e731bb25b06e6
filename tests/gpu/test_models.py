"""On a GPU: published shapes with random weights, bf16, against transformers; run with `make test-gpu`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stenograph.config.facts import ModelFacts
from stenograph.executor.step import Step, StepRow
from stenograph.layers.linear import Build
from stenograph.memory.kv_cache import KVCache
from stenograph.models.registry import build_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

QWEN3 = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


@dataclass
class Ours:
    """Our model over a small cache, fed with transformers' own weights."""

    model: Any
    backend: Any
    page_size: int

    def logits(self, rows: list[StepRow], num_decode: int = 0) -> torch.Tensor:
        from stenograph.executor.executor import Executor

        executor = Executor.__new__(Executor)
        executor.model, executor.device, executor.page_size = self.model, torch.device("cuda"), self.page_size
        return self.model.logits(executor._forward(self.backend, Step(rows=rows, num_decode=num_decode)))


def make_ours(reference: Any, config: Any, page_size: int, tokens: int) -> Ours:
    from stenograph.attention.torch_native import TorchNativeBackend

    facts = ModelFacts.from_config(config.to_dict())
    model = build_model(Build(device=torch.device("cuda"), dtype=torch.bfloat16), facts, 4096)
    for name, value in reference.state_dict().items():
        assert model.load_weight(name, value) or name == "lm_head.weight"
    assert model.missing_weights() == []
    model.finish_loading()
    cache = KVCache(
        num_layers=facts.num_layers,
        num_pages=tokens // page_size + 2,
        page_size=page_size,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    return Ours(model, TorchNativeBackend(cache), page_size)


@pytest.mark.parametrize("size", ["0.6b", "8b"])
@torch.inference_mode()
def test_bf16_agrees_with_transformers(size: str) -> None:
    """Our distance from an fp32 reference is no more than 1.25 times transformers' own in bf16 (prefill and decode)."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **{
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "architectures": ["Qwen3ForCausalLM"],
        },
        **QWEN3[size],
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for parameter in reference.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    ours = make_ours(reference, config, 16, 4096)
    rng = random.Random(0)
    ids = [rng.randrange(151936) for _ in range(300)]
    other = [rng.randrange(151936) for _ in range(77)]
    theirs = reference(torch.tensor([ids], device="cuda")).logits[0].float()
    pages, more = list(range(1, 21)), list(range(30, 36))
    prefill = ours.logits(
        [
            StepRow(token_ids=other, start=0, pages=more, sampling=None),
            StepRow(token_ids=ids[:250], start=0, pages=pages, sampling=None),
        ]
    )[77:]
    steps = [prefill]
    for position in range(250, 300):  # two rows of different length decode side by side
        rows = [
            StepRow(token_ids=[ids[position]], start=position, pages=pages, sampling=None),
            StepRow(token_ids=[other[position % 77]], start=77 + (position - 250) % 19, pages=more, sampling=None),
        ]
        steps.append(ours.logits(rows, num_decode=2)[:1])
    mine = torch.cat(steps)
    reference.float()
    exact = reference(torch.tensor([ids], device="cuda")).logits[0]
    their_error = ((theirs - exact).norm() / exact.norm()).item()
    my_error = ((mine - exact).norm() / exact.norm()).item()
    print(f"qwen3-{size}: relative error to fp32: transformers {their_error:.2e}, ours {my_error:.2e}")
    assert my_error <= 1.25 * their_error
    assert their_error < 0.1
