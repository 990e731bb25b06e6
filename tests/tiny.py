"""Tiny random models in the Hugging Face layout, made with transformers, with a byte-level tokenizer.

Weights are drawn wide enough that logits differ by whole units: greedy choices don't hang on rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 320  # 256 bytes, a few control tokens, and room beyond the tokenizer
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
EOS_ID = 257

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def config_of(architecture: str, **changes: Any) -> Any:
    """A transformers configuration; the windowed ones have windows shorter than the tests' prompts."""
    import transformers as t

    if architecture == "llama":
        return t.LlamaConfig(**{**SHAPE, **changes})
    if architecture == "mistral":
        return t.MistralConfig(**{**SHAPE, "sliding_window": 24, "head_dim": 16, **changes})
    if architecture == "qwen2":
        return t.Qwen2Config(**{**SHAPE, **changes})
    if architecture == "qwen3":
        return t.Qwen3Config(**{**SHAPE, "head_dim": 32, **changes})
    if architecture == "gemma3":
        extra = {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        }
        return t.Gemma3TextConfig(**{**SHAPE, **extra, **changes})
    raise ValueError(architecture)


def reference_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model of random weights, biases and norms included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                base = 1.0 if "norm" in name and "gemma" not in config.model_type else 0.0
                parameter.copy_(base + 0.2 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter.normal_(std=0.7 / (config.hidden_size**0.5 if "gemma" in config.model_type else 1.0) * 4)
            else:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Byte b is token b, so that tests can write prompts as bytes.
    byte_chars = _byte_to_char()
    assert sorted(byte_chars.values()) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab={byte_chars[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|eos|>",
                "bos_token": "<|bos|>",
                "pad_token": "<|pad|>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def _byte_to_char() -> dict[int, str]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the others are moved above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(printable))
    return table


def save_tiny(
    directory: Path, architecture: str = "llama", *, seed: int = 0, shard: str | None = None, **changes: Any
) -> Any:
    """Saves a tiny model with its tokenizer; returns the transformers model."""
    config = config_of(architecture, **changes)
    model = reference_model(config, seed=seed)
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    save_tokenizer(directory)
    return model


def greedy_reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens from transformers, end tokens not stopping it."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()
