"""Small vocabularies, as a GGUF file's key-values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stenograph.tokenizer.gguf import build_tokenizer
from stenograph.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import _byte_to_char

BYTE_CHAR = _byte_to_char()
MARKERS = ["<|start|>", "<|end|>", "<|", "<s>", "←"]  # "<|" is a token, but no control token; "←" has no inside
WORDS = (" the", "the", "é", "hello")
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def spell(text: str) -> str:
    """Text in the byte-level alphabet."""
    return "".join(BYTE_CHAR[b] for b in text.encode())


def byte_level(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """All bytes (byte b is token b), then a token for each word's beginnings, then the markers."""
    tokens, merges = [BYTE_CHAR[b] for b in range(256)], []
    for word in map(spell, WORDS):
        for length in range(2, len(word) + 1):
            if word[:length] not in tokens:
                tokens.append(word[:length])
                merges.append(f"{word[: length - 1]} {word[length - 1]}")
    types = [1] * len(tokens) + [USER_DEFINED if marker == "<|" else CONTROL for marker in MARKERS]
    tokens += MARKERS
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        **more,
    }


def sentencepiece(*, space_prefix: bool = True, **more: Any) -> dict[str, Any]:
    """Better scores come first: "▁he" beats "el", which beats "lo". "x" is spelt by its byte alone."""
    control, user = ["<unk>", "<s>", "</s>"], ["<tool>", "   "]
    pieces = list(dict.fromkeys(["▁h", "▁he", "el", "lo", "ll", "llo", "▁hello", "é", *"▁helo</s>ABC "]))
    tokens = [*control, *(f"<0x{b:02X}>" for b in range(256)), *user, *pieces]
    types = [2, 3, 3] + [BYTE] * 256 + [USER_DEFINED] * len(user) + [1] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": space_prefix,
        **more,
    }


def load(metadata: dict[str, Any], **options: Any) -> Tokenizer:
    found = load_tokenizer(source(metadata=metadata), settings(**options))
    assert found is not None
    return found


def source(path: Any = None, metadata: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(path=path, metadata=metadata or {})


def settings(**options: Any) -> Any:
    return SimpleNamespace(**{"tokenizer": None, "chat_template": None, "trust_remote_code": False, **options})


def backend(metadata: dict[str, Any]) -> Any:
    return build_tokenizer(metadata)
