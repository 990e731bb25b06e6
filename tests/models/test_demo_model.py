"""The demo model out of its GGUF file: fp32 against transformers with the same numbers; bf16 with packed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stenograph import LLM, SamplingParams
from stenograph.loading.source import open_model
from tests.whole_pass import logits_of

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,",
    "The chemical symbol of gold is",
    "Dear Sir or Madam,",
    "A",
    "Translate to German: Good morning! How are you today?",
    "In 1969, Neil Armstrong became the first person to walk on the Moon. He said:",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' Llama with the file's weights, dequantised in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from stenograph.layers.linear import dense

    source = open_model("smollm2-135m")
    known = {k: v for k, v in source.config.items() if k not in ("model_type", "architectures")}
    model = LlamaForCausalLM(LlamaConfig(**known)).eval()
    state = {name: dense(value, torch.float32) for name, value in source.weights()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def fp32() -> LLM:
    return LLM("smollm2-135m", device="cpu", dtype="float32", max_total_tokens=4096, threads=1, progress=False)


def test_logits_and_tokens_equal_transformers(reference: Any, fp32: LLM) -> None:
    encoded = [fp32.tokenizer.encode(p) for p in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    answers = [a.outputs[0].token_ids for a in fp32.generate(PROMPTS, params)]
    for ids, answer in zip(encoded, answers, strict=True):
        # Greedy tokens are the same if each is the most likely after the ones before it: one pass shows all 48.
        with torch.inference_mode():
            found = reference(torch.tensor([ids + answer])).logits[0]
        assert found[len(ids) - 1 : -1].argmax(-1).tolist() == answer and len(answer) == 48
    with torch.inference_mode():
        expected = reference(torch.tensor([encoded[3]])).logits[0]
    torch.testing.assert_close(logits_of(fp32.core.executor.model, encoded[3]), expected, atol=1e-4, rtol=0)


def test_packed_weights_in_bf16_agree_to_bf16_accuracy(reference: Any, fp32: LLM) -> None:
    """A short and a long prompt: packed and blocked products; no further off than transformers in bf16."""
    packed = LLM("smollm2-135m", device="cpu", dtype="bfloat16", max_total_tokens=1024, threads=1, progress=False)
    model = packed.core.executor.model
    assert all(layer.mlp.down_proj.packed is not None for layer in model.layers) and model.lm_head.packed is not None
    half = reference.to(torch.bfloat16)
    for prompt in (PROMPTS[0], PROMPTS[9]):
        ids = packed.tokenizer.encode(prompt)
        exact = logits_of(fp32.core.executor.model, ids)
        with torch.inference_mode():
            theirs = half(torch.tensor([ids])).logits[0].float()
        assert _error(logits_of(model, ids), exact) <= 1.5 * _error(theirs, exact)
    answer = packed.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    assert "Paris" in answer


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def test_little_memory_keeps_no_dense_copies(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the packed weights serve steps of any size, to the same accuracy."""
    monkeypatch.setattr("stenograph.executor.executor.available_host_bytes", lambda: 700 << 20)
    small = LLM("smollm2-135m", device="cpu", dtype="bfloat16", max_total_tokens=1024, threads=1, progress=False)
    model = small.core.executor.model
    assert all(layer.mlp.down_proj.packed.dense is None for layer in model.layers)
    ids = small.tokenizer.encode(PROMPTS[9])
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0].float()
    assert _error(logits_of(model, ids), theirs) < 0.05
