"""A SentencePiece vocabulary as a GGUF file holds it, against the sentencepiece package that made it."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import pytest
import sentencepiece

from stenograph.tokenizer.gguf import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from stenograph.tokenizer.tokenizer import Tokenizer, _from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Whatever is worth doing at all is worth doing well; so say those who do it.",
    "In 1984 there were 365 days; in 2024, 366. Numbers such as 3.14159 have many digits.",
    "for i in range(10):\n    if i % 2:\n        print(i)\n",
    "naïve café, Zürich, façade, über, señor",
    "  two  spaces   three    four     five",
]


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """Small, but of the making of Llama's and Gemma's: BPE, bytes for what is unknown, every space kept."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_gguf(
    made: sentencepiece.SentencePieceProcessor, *, space_in_front: bool, symbols: Sequence[str] = ()
) -> Tokenizer:
    def kind(index: int) -> int:
        if made.is_unknown(index):
            return UNKNOWN
        if made.is_control(index):
            return CONTROL
        if made.is_byte(index):
            return BYTE
        return USER_DEFINED if made.id_to_piece(index) in symbols else 1

    ids = range(made.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [made.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [made.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": made.bos_id(),
        "tokenizer.ggml.eos_token_id": made.eos_id(),
        "tokenizer.ggml.unknown_token_id": made.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_in_front,
    }
    return Tokenizer(**_from_gguf(metadata))


def texts(seed: int = 0) -> list[str]:
    chosen = random.Random(seed)
    words = " ".join(CORPUS).split(" ")
    alphabet = [*"abcdefghij ÄéßñЖ中文😀👍🏽\u0301\u200b\t\n", "  ", "\n\n", "'ll", "12"]
    found = ["", "a", " ", "   ", "\n", "x" * 200, " leading", "trailing ", *CORPUS]
    found += [" ".join(chosen.choices(words, k=chosen.randrange(1, 12))) for _ in range(150)]
    found += ["".join(chosen.choices(alphabet, k=chosen.randrange(1, 30))) for _ in range(150)]
    return found


@pytest.mark.parametrize("space_in_front", [True, False], ids=["as Llama", "as Gemma"])
def test_every_text_gets_the_ids_that_sentencepiece_gives_it(space_in_front: bool) -> None:
    made = train(add_dummy_prefix=space_in_front)
    tokenizer = as_gguf(made, space_in_front=space_in_front)
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == made.encode(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_symbols_of_the_makers_are_one_token_wherever_they_stand() -> None:
    """Gemma's vocabulary holds runs of spaces and lines this way."""
    symbols = ["<note>", "\n\n", "▁▁", "▁▁▁"]
    made = train(add_dummy_prefix=False, user_defined_symbols=symbols)
    tokenizer = as_gguf(made, space_in_front=False, symbols=symbols)
    for text in ["a<note>b", "<note>", "one\n\ntwo", *texts(1)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == made.encode(text), repr(text)
        assert tokenizer.decode(ids) == text
