"""A tokenizer out of a GGUF file's metadata, built with the tokenizers package.

Two families: "gpt2", byte-level BPE with merges, its words cut by a named pre-tokenizer; and "llama", SentencePiece BPE
with scores and a byte token for everything that has no piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stenograph.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
BYTE_LEVEL = ("gpt-2", "default")
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises `ModelLoadError` for a tokenizer of another family or with an unknown pre-tokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("The GGUF file holds no vocabulary.", remedy="Set --tokenizer to one.")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise ModelLoadError(f"The GGUF tokenizer {kind!r} is not supported.", remedy="Supported: gpt2, llama. Set --tokenizer.")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    # A token is "special" (never shown, never made from pieces) if it controls; user-defined ones are plain text.
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=False) if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=False) if k == USER_DEFINED])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    name = ALIASES.get(name, name)
    merges = [tuple(line.split(" ", 1)) for line in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))  # type: ignore[arg-type]
    if name in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif name in BYTE_LEVEL:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif name in DIGITS_APART:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    else:
        known = ", ".join((*BYTE_LEVEL, *DIGITS_APART, *SPLITS, *ALIASES))
        raise ModelLoadError(f"The GGUF pre-tokenizer {name!r} is not known.", remedy=f"Known: {known}. Set --tokenizer.")
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    mergeable = {t: i for t, i in vocabulary.items() if i >= len(types) or types[i] in (NORMAL, USER_DEFINED)}
    found = []
    for token, index in mergeable.items():
        # Best score first; of the ways to split one piece, by the ids of its halves.
        found += [
            (-scores[index], mergeable[token[:cut]], mergeable[token[cut:]], token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
    merges = [(left, right) for _, _, _, left, right in sorted(found)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer
