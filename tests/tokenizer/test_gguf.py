"""Tokenizers from GGUF key-values."""

from __future__ import annotations

from typing import Any

import pytest

from stenograph.errors import ModelLoadError, RequestError
from stenograph.tokenizer.gguf import WORD_PATTERNS
from tests.tokenizer.vocabularies import byte_level, load, sentencepiece


def words(pre: str, text: str) -> list[str]:
    """How a kind cuts text before merging."""
    tokenizer = load(byte_level(pre)).backend
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["I", "'m", " x", "  ", " 12345", " =", " CamelCase", "\n", "\n", "a", "'", "S"]),
        ("default", ["I", "'m", " x", "  ", " 12345", " =", " CamelCase", "\n", "\n", "a", "'", "S"]),
        ("smollm", ["I", "'m", " x", "   ", *"12345", " =", " CamelCase", "\n", "\n", "a", "'", "S"]),
        ("llama-bpe", ["I", "'m", " x", "  ", " ", "123", "45", " =", " CamelCase", "\n\n", "a", "'S"]),
        ("qwen2", ["I", "'m", " x", "  ", " ", *"12345", " =", " CamelCase", "\n\n", "a", "'S"]),
        ("tekken", ["I", "'m", " x", "  ", " ", *"12345", " =", " Camel", "Case", "\n\n", "a", "'S"]),
        ("gpt-4o", ["I'm", " x", "  ", " ", "123", "45", " =", " Camel", "Case", "\n\n", "a'S"]),
    ],
)
def test_each_kind_cuts_words_its_way(pre: str, cut: list[str]) -> None:
    text = "I'm x   12345 = CamelCase\n\na'S"
    found = words(pre, text)
    assert "".join(found) == text
    assert found == cut


def test_merges_and_bytes() -> None:
    tokenizer = load(byte_level())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the the x é")] == ["the", " the", " ", "x", " ", "é"]
    assert tokenizer.encode("\x00\xff") == [0, 0xC3, 0xBF]


def test_qwen_composes_characters() -> None:
    assert load(byte_level("qwen2")).encode("e\u0301") == load(byte_level("qwen2")).encode("é")
    assert load(byte_level("llama-bpe")).encode("e\u0301", False) == list("e\u0301".encode())


def test_llama_3_takes_a_whole_word_without_merges() -> None:
    metadata = byte_level("llama-bpe")
    metadata["tokenizer.ggml.merges"] = []
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    assert load(metadata).encode("hello", False) == [tokens.index("hello")]
    assert load({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("hello") == list(b"hello")


def test_control_tokens_are_found_in_text() -> None:
    tokenizer = load(byte_level())
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("<|start|>a<|<|end|>")]
    assert tokens == ["<|start|>", "a", "<|", "<|end|>"]
    assert {tokenizer.id_to_token(i) for i in tokenizer.special_ids} == {"<|start|>", "<|end|>", "<s>", "←"}
    assert [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids] == ["<|end|>"]


def test_an_end_token_is_a_control_token_whatever_the_file_calls_it() -> None:
    metadata = byte_level()
    end = metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.token_type"][end] = 4
    assert end in load(metadata).special_ids


@pytest.mark.parametrize(
    ("metadata", "begins", "ends"),
    [
        (byte_level(), False, False),
        (byte_level("llama-bpe"), True, False),
        (byte_level(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}), True, True),
        (byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}), False, False),
        (sentencepiece(), True, False),
        (sentencepiece(**{"tokenizer.ggml.add_bos_token": False}), False, False),
    ],
)
def test_the_tokens_around_a_text(metadata: dict[str, Any], begins: bool, ends: bool) -> None:
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = load(metadata)
    inner = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [bos] * begins + inner + [eos] * ends
    assert tokenizer.encode("") == [bos] * begins + [eos] * ends and tokenizer.encode("", False) == []


def test_sentencepiece_joins_by_score() -> None:
    tokenizer = load(sentencepiece())

    def tokens(text: str) -> list[str | None]:
        return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert tokens("hello") == ["▁hello"]
    assert tokens("hel") == ["▁he", "l"]  # ▁he has a better score than el
    assert tokens("ello") == ["▁", "el", "lo"]  # el has a better score than ll and llo
    assert tokens("x é") == ["▁", "<0x78>", "▁", "é"]
    assert tokens("😀") == ["▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokens("A   B<tool>") == ["▁", "A", "   ", "▁", "B", "<tool>"]
    assert tokens("</s>") == ["</s>"]


def test_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = load(sentencepiece(space_prefix=False))
    ids = tokenizer.encode(" hello", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["▁hello"] and tokenizer.decode(ids) == " hello"


def test_decoding_agrees_with_the_tokenizers_package() -> None:
    for metadata in (byte_level(), sentencepiece(), sentencepiece(space_prefix=False)):
        tokenizer = load(metadata)
        for text in ["the hello é😀", " hello", "", "a\n\n  b", "<tool>x"]:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)
            if "<tool>" not in text:  # SentencePiece puts its space after it, too
                assert tokenizer.decode(ids) == text


def test_padding_that_repeats_a_name_keeps_the_first_id() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += ["the"]
    metadata["tokenizer.ggml.token_type"] += [5]
    first = metadata["tokenizer.ggml.tokens"].index("the")
    assert load(metadata).encode("the") == [first]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'; known are gpt2, llama"),
        ({"tokenizer.ggml.pre": "runes"}, "'runes'; known are default, gpt-2"),
        ({"tokenizer.ggml.tokens": []}, "without tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types"),
        ({"tokenizer.ggml.merges": ["no such"]}, "damaged"),
        ({"tokenizer.ggml.tokens": ["half a letter: \udcb8"], "tokenizer.ggml.token_type": [1]}, "damaged"),
        ({"tokenizer.ggml.model": "llama"}, "lacks a score"),
    ],
)
def test_what_is_unknown_or_damaged_is_told(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        load({**byte_level(), **changes})
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_every_known_kind_can_be_built() -> None:
    for pre in WORD_PATTERNS:
        tokenizer = load(byte_level(pre))
        assert tokenizer.decode(tokenizer.encode("Hello, the 123 é\n")) == "Hello, the 123 é\n"


def test_half_a_surrogate_pair_is_the_callers_error() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load(byte_level()).encode("a\ud800")
