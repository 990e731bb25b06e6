"""Answers in pieces are the same text as answers in one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.tokenizer.detokenizer import Detokenizer
from stenograph.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import byte_level, load, sentencepiece

BYTE_LEVEL = load(byte_level())
SENTENCEPIECE = load(sentencepiece())
TOKENIZERS = [BYTE_LEVEL, SENTENCEPIECE, load(sentencepiece(space_prefix=False))]
SAMPLE = "the 😀 中文 e\u0301 é👩\u200d🚀 hello\n\ttail"


def pieces(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True, prompt: Sequence[int] = ()
) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return "".join(detokenizer.add(ids[a:b]) for a, b in pairwise(edges)) + detokenizer.finish()


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_characters_split_over_tokens_arrive_whole(tokenizer: Tokenizer) -> None:
    """P-02: emoji, CJK, combining marks, byte fallback."""
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert len(ids) > len(SAMPLE) // 2
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.add([i]) for i in ids]
    assert "".join(texts) == SAMPLE == tokenizer.decode(ids)
    assert "" in texts and "😀" in texts and not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_cut_of_an_answer_reads_the_same_streamed_and_whole(tokenizer: Tokenizer) -> None:
    """P-01: an answer that ends inside a character ends before it, in both."""
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        whole = tokenizer.decode(ids[:cut])
        assert pieces(tokenizer, ids[:cut], list(range(cut))) == pieces(tokenizer, ids[:cut], []) == whole
        assert SAMPLE.startswith(whole)


@given(st.sampled_from(TOKENIZERS), st.data(), st.booleans())
def test_pieces_join_to_the_whole_for_any_tokens(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 24), max_size=6))
    assert pieces(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip)


@given(st.sampled_from(TOKENIZERS), st.data())
def test_an_answer_continues_its_prompt(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    prompt, ids, cuts = data.draw(tokens), data.draw(tokens), data.draw(st.lists(st.integers(0, 12), max_size=4))
    assert tokenizer.decode(prompt) + pieces(tokenizer, ids, cuts, prompt=prompt) == tokenizer.decode(prompt + ids)


@given(st.binary(max_size=12))
def test_bytes_that_are_no_text_become_replacement_characters(raw: bytes) -> None:
    # What follows settles that the last character isn't open.
    assert BYTE_LEVEL.decode([*raw, 33]) == (raw + b"!").decode(errors="replace")


@given(st.text(max_size=40))
def test_text_survives_encoding(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    """P-13: log-probability entries of a split character hold its bytes, not a replacement character's."""
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    raw = b"".join(map(tokenizer.token_bytes, ids))
    assert raw.decode().removeprefix(" " if tokenizer.drops_leading_space else "") == SAMPLE


def test_every_byte_has_a_token_in_both_spellings() -> None:
    assert [BYTE_LEVEL.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert [SENTENCEPIECE.token_bytes(3 + b) for b in range(256)] == [bytes([b]) for b in range(256)]


def test_control_tokens_are_shown_when_asked_for() -> None:
    (end,) = BYTE_LEVEL.eos_token_ids
    ids = [*b"a\xf0\x9f", end, *b"\x98\x80", end]
    assert BYTE_LEVEL.decode(ids) == pieces(BYTE_LEVEL, ids, [1, 2, 3, 4]) == "a😀"
    shown = "a\ufffd<|end|>\ufffd\ufffd<|end|>"
    assert BYTE_LEVEL.decode(ids, False) == pieces(BYTE_LEVEL, ids, [2, 4], False) == shown
    assert BYTE_LEVEL.token_bytes(end) == b"<|end|>" and BYTE_LEVEL.token_text(end) == "<|end|>"


def test_ids_after_the_vocabulary_are_no_text() -> None:
    beyond = BYTE_LEVEL.vocab_size
    assert BYTE_LEVEL.decode([97, beyond, 98, 10**9, -1]) == "ab"
    assert BYTE_LEVEL.token_bytes(beyond) == b"" and BYTE_LEVEL.id_to_token(beyond) is None


def test_the_mark_of_the_first_word_is_no_space() -> None:
    hello = SENTENCEPIECE.encode("hello", add_special_tokens=False)
    assert SENTENCEPIECE.id_to_token(hello[0]) == "▁hello" and SENTENCEPIECE.token_bytes(hello[0]) == b" hello"
    (begin,) = SENTENCEPIECE.encode("", add_special_tokens=True)
    assert pieces(SENTENCEPIECE, hello, [], prompt=[begin]) == SENTENCEPIECE.decode([begin, *hello]) == "hello"
    assert pieces(SENTENCEPIECE, hello, [], prompt=hello) == " hello"
    assert SENTENCEPIECE.decode([begin, *hello], skip_special_tokens=False) == "<s> hello"
