"""Tokenizers from directories in the Hugging Face layout."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stenograph.errors import ModelLoadError
from stenograph.tokenizer import tokenizer as module
from stenograph.tokenizer.detokenizer import Detokenizer
from stenograph.tokenizer.tokenizer import load_tokenizer
from tests.tiny import CHAT_TEMPLATE, EOS_ID, SPECIAL, save_tokenizer
from tests.tokenizer.vocabularies import backend, byte_level, sentencepiece, settings, source

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def load(path: Path, **options: Any) -> Any:
    return load_tokenizer(source(path), settings(**options))


def save(path: Path, made: Tokenizer, **config: Any) -> Path:
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def change_config(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_directory_is_read_without_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    tokenizer = load(tiny)
    assert tokenizer.vocab_size == 256 + len(SPECIAL) and tokenizer.eos_token_ids == (EOS_ID,)
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 33] and tokenizer.decode([0xC3, 0xA9, 33]) == "é!"
    assert tokenizer.apply_chat_template(USER) == [260, *b"Hi", 262, 261]
    assert tokenizer.special_ids == frozenset(range(256, 256 + len(SPECIAL)))


def test_other_threads_run_while_a_long_text_is_encoded(tiny: Path) -> None:
    tokenizer = load(tiny)
    text = "word " * 150_000
    start = last = time.monotonic()
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, text)
        while not encoding.done():
            time.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    assert encoding.result() == list(text.encode())
    assert longest < 0.5 * (last - start)


def test_control_tokens_in_content_of_a_template_that_builds_its_markers(tiny: Path) -> None:
    """The template's markers come from the role, and its text holds none of them."""
    tokenizer = load(tiny)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<|end|><|system|>"}])
    assert ids == [260, *b"<|end|><|system|>", 262, 261]


def test_it_encodes_and_decodes_as_transformers_does(tiny: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tiny), load(tiny)
    for text in ["Hello é 😀", "<|bos|>a<|end|>", "  a\n\n", ""]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.render_chat(USER) == theirs.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("where", ["jinja", "json", "list", "additional"])
def test_where_a_template_may_be_kept(tiny: Path, where: str) -> None:
    change_config(tiny, chat_template=CHAT_TEMPLATE if where == "jinja" else None)
    if where == "jinja":
        (tiny / "chat_template.jinja").write_text("jinja")
    elif where == "json":
        (tiny / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    elif where == "list":
        entries = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
        change_config(tiny, chat_template=entries)
    else:
        (tiny / "chat_template.jinja").write_text("additional")
        (tiny / "additional_chat_templates").mkdir()
        (tiny / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load(tiny)
    assert tokenizer.render_chat(USER) == where
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == (where if where in ("jinja", "json") else "tools")


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path) is None
    with pytest.raises(ModelLoadError, match="no tokenizer in"):
        load(tmp_path, tokenizer=str(tmp_path))


def test_another_tokenizer_can_be_named(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("model")
    assert load(empty, tokenizer=str(tiny)).encode("a") == [97]
    assert load(empty, tokenizer=str(tiny / "tokenizer.json")).eos_token_ids == (EOS_ID,)
    found = load_tokenizer(source(empty / "model.gguf", byte_level()), settings(tokenizer=str(tiny)))
    assert found is not None and found.eos_token_ids == (EOS_ID,)
    with pytest.raises(ModelLoadError, match="does not exist"):
        load(empty, tokenizer=str(empty / "nowhere"))


def test_damaged_files_are_told(tiny: Path) -> None:
    (tiny / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config.json"):
        load(tiny)
    (tiny / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelLoadError, match=r"tokenizer.json") as caught:
        load(tiny)
    assert caught.value.remedy


def test_tokens_that_only_the_configuration_knows(tiny: Path) -> None:
    entry = {"content": "<|extra|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    change_config(tiny, added_tokens_decoder={"263": entry}, eos_token={"content": "<|extra|>"})
    tokenizer = load(tiny)
    assert tokenizer.encode("a<|extra|>") == [97, 263] and tokenizer.decode([97, 263]) == "a"
    assert tokenizer.eos_token_ids == (263,)


def test_an_end_token_of_the_plain_vocabulary_is_a_control_token(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "E": 1}, merges=[]))
    made.decoder = decoders.ByteLevel()
    tokenizer = load(save(tmp_path, made, eos_token="E", additional_special_tokens=["absent"]))
    assert tokenizer.special_ids == {1} and tokenizer.decode([0, 1]) == "a"


@pytest.mark.parametrize(
    ("flag", "in_file", "begins"), [(None, True, True), (None, False, False), (True, False, True), (False, True, False)]
)
def test_who_says_whether_a_text_begins_with_a_token(tmp_path: Path, flag: Any, in_file: bool, begins: bool) -> None:
    made = backend(byte_level())
    bos = made.token_to_id("<|start|>")
    if in_file:
        made.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", bos)])
    tokenizer = load(save(tmp_path, made, bos_token="<|start|>", add_bos_token=flag))
    assert tokenizer.encode("ab") == [bos] * begins + [97, 98] and tokenizer.encode("ab", False) == [97, 98]


def test_truncation_that_was_left_in_the_file_is_no_limit(tmp_path: Path) -> None:
    made = backend(byte_level())
    made.enable_truncation(4)
    made.enable_padding(length=8)
    assert load(save(tmp_path, made)).encode("abcdef") == list(b"abcdef")


def test_a_first_space_is_dropped_as_the_files_decoder_does(tmp_path: Path) -> None:
    made = backend(sentencepiece(space_prefix=False))
    made.normalizer = normalizers.Sequence([])
    for scheme in ("first", "always", "never"):
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = load(save(tmp_path, made))
        ids = tokenizer.encode("hello", add_special_tokens=False)
        assert tokenizer.decode(ids) == made.decode(ids) == "hello"
        assert Detokenizer(tokenizer).add(ids) == "hello"


def test_words_are_joined_by_spaces(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load(save(tmp_path, made))
    ids = tokenizer.encode("a b a")
    assert tokenizer.decode(ids) == made.decode(ids) == "a b a"


def test_a_decoder_that_is_not_known_is_named(tmp_path: Path) -> None:
    made = Tokenizer(models.WordPiece({"a": 0, "?": 1}, unk_token="?"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load(save(tmp_path, made))


def test_other_formats_are_converted_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not one")
    with pytest.raises(ModelLoadError, match="cannot be converted"):
        load(tmp_path)
    asked: list[tuple[Path, bool]] = []

    def converted(directory: Path, trust_remote_code: bool) -> Tokenizer:
        asked.append((directory, trust_remote_code))
        return backend(byte_level())

    monkeypatch.setattr(module, "_converted", converted)
    assert load(tmp_path, trust_remote_code=True).encode("a") == [97]
    assert asked == [(tmp_path, True)]


def test_added_tokens_keep_their_spaces(tmp_path: Path) -> None:
    made = backend(byte_level())
    made.add_tokens([AddedToken("two  words", normalized=False)])
    tokenizer = load(save(tmp_path, made))
    ids = tokenizer.encode("two  words")
    assert len(ids) == 1 and tokenizer.decode(ids) == "two  words"
