"""A real model with weights set by hand, so that its greedy answers are known: each token has one successor.

Token t's embedding is the unit vector e_t, attention and MLP add nothing, and the output row of t's successor is e_t.
The successors run through the bytes of `CHAIN` in a circle; "!" is followed by the end token; every other token by the
circle's first byte. `NOISE` makes it a source of noise instead. `POISON`'s embedding is not a number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import EOS_ID, VOCAB, config_of, save_tokenizer

CHAIN = "a😀b中cé?LMNOPQR."
BYTES = CHAIN.encode()
POISON = VOCAB - 1
CONTEXT = 4096
NOISE: dict[str, Any] = {"temperature": 5, "ignore_eos": True, "logit_bias": {str(POISON): -100}}
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if loop.index0 and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chain_bytes(count: int, after: str = ".") -> bytes:
    """What the model says after a prompt that ends with `after`."""
    start = (BYTES.index(after.encode()[-1:]) + 1) if after.encode()[-1:] in BYTES else 0
    return bytes(BYTES[(start + i) % len(BYTES)] for i in range(count))


def chain_text(count: int, after: str = ".") -> str:
    """The same as text: a character cut in the middle is left out."""
    return chain_bytes(count, after).decode(errors="ignore")


def save_chain(directory: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    assert len(set(BYTES)) == len(BYTES), "each byte has one successor"
    config = config_of(
        "llama", hidden_size=VOCAB, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    successor = [BYTES[0]] * VOCAB
    for i, byte in enumerate(BYTES):
        successor[byte] = BYTES[(i + 1) % len(BYTES)]
    successor[ord("!")] = EOS_ID
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.model.embed_tokens.weight[POISON] = torch.nan
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(successor), torch.arange(VOCAB)] = 1.0
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    save_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return directory
