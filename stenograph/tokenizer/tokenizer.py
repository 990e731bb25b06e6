"""`Tokenizer`: text to token ids and back, conversations to token ids. Where it comes from is told by `load_tokenizer`.

Decoding is done here, byte by byte, rather than by the tokenizers package: answers come in pieces, and the pieces must
add up to what the whole would be.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stenograph.errors import ModelLoadError, RequestError
from stenograph.tokenizer.chat import ChatTemplate, plain_messages
from stenograph.tokenizer.content_guard import ContentGuard, encode_plain, new_break

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from stenograph.config.resolve import Resolved
    from stenograph.loading.source import ModelSource

Messages = Sequence[Mapping[str, Any]]
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "spiece.model")


class Tokenizer:
    """
    special_ids           control tokens: no text of an answer unless asked for
    eos_token_ids         what the tokenizer's own files call the end of a sequence
    chat_template         None where the model has none
    drops_leading_space   whether a text's first space is the vocabulary's mark of a word, not part of the text

    Ids from the vocabulary's end up to the model's padded size have no text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        special_tokens_in_content: bool = False,
    ) -> None:
        """`special_tokens` are texts by name ("bos_token"); add_bos/add_eos None: as the backend has it."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        self.eos_token_ids = self._ids_of("eos_token")
        self._prefix, self._suffix = self._around()
        self._prefix = _with_token(self._prefix, self._ids_of("bos_token"), add_bos, first=True)
        self._suffix = _with_token(self._suffix, self._ids_of("eos_token"), add_eos, first=False)
        self._decoding = _decoding_of(backend)
        self.drops_leading_space = self._decoding.drops_leading_space
        self._bytes: dict[int, bytes] = {}
        self.chat_template = ChatTemplate(chat_templates, self.special_tokens) if chat_templates else None
        control = {index: self._added[index] for index in self.special_ids}
        self._guard = None if special_tokens_in_content else ContentGuard(backend, control)

    # -- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control tokens in `text` become their ids. Raises `RequestError` for text that is no valid Unicode."""
        ids = self._encode(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def _encode(self, text: str) -> list[int]:
        return encode_plain(self.backend, _valid(text))

    def apply_chat_template(
        self, messages: Messages, tools: Any = None, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of the rendered conversation; control-token text inside the messages stays plain text.

        Raises `RequestError` where the model has no chat template or the template refuses the messages.
        """
        messages = plain_messages(messages)
        variables = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        guard, template = self._guard, self._template()
        try:
            if guard is None or not guard.is_suspect([messages, variables]):
                return self._encode(template.render(messages, **variables))
            break_ = new_break()
            messages, variables = guard.break_markers(messages, break_), guard.break_markers(variables, break_)
        except RecursionError:
            raise RequestError("The messages are nested too deeply.", param="messages") from None
        return guard.encode(_valid(template.render(messages, **variables)), break_)

    def render_chat(
        self, messages: Messages, tools: Any = None, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the template renders it. For people: a marker and its text in content look alike."""
        messages = plain_messages(messages)
        return self._template().render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                "This model has no chat template.",
                param="messages",
                code="no_chat_template",
                remedy="Start the server with --chat-template FILE, or use completions.",
            )
        return self.chat_template

    # -- ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Bytes that form no character become U+FFFD; a character that is still open at the end is left out."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        text, _ = codecs.utf_8_decode(raw, "replace", False)
        return text.removeprefix(" ") if self.drops_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text. A control token gives its name; an id without a token gives nothing."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The token by itself; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling; None for an id without a token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        return b"" if token is None else self._decoding.bytes_of(token, added=token_id in self._added)

    # -- inner workings

    def _ids_of(self, name: str) -> tuple[int, ...]:
        text = self.special_tokens.get(name)
        found = None if text is None else self.backend.token_to_id(text)
        return () if found is None else (found,)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Control tokens that the backend puts before and after a text."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start]), tuple(whole[start + len(plain) :])
        return (), ()


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("The text holds half of a surrogate pair, which is no character.") from None
    return text


def _with_token(ids: tuple[int, ...], token: tuple[int, ...], wanted: bool | None, *, first: bool) -> tuple[int, ...]:
    """`ids` with the token at its place, or without it."""
    if wanted is None or not token:
        return ids
    without = tuple(i for i in ids if i not in token)
    if not wanted:
        return without
    return token + without if first else without + token


# -- decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoding:
    """How a vocabulary spells bytes.

    byte_level      one character a byte (GPT-2's alphabet)
    byte_fallback   "<0x0A>" is a byte
    replacements    of characters in tokens: SentencePiece's mark of a space
    before          what stands before every token
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    before: str = ""
    drops_leading_space: bool = False

    def bytes_of(self, token: str, *, added: bool) -> bytes:
        if self.byte_level and not added:
            return _byte_level_bytes(token)
        if self.byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.before + token).encode()


def _decoding_of(backend: Backend) -> _Decoding:
    """From the description of the backend's decoder. Raises `ModelLoadError` for one that isn't known here."""
    decoder = backend.decoder
    if decoder is None:  # words
        return _Decoding(before=" ", drops_leading_space=True)
    described = json.loads(decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    byte_level = byte_fallback = drops = False
    replacements: list[tuple[str, str]] = []
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            drops = step["start"] == 1
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            drops = step.get("prepend_scheme", "always") != "never"
        elif kind != "Fuse":
            raise ModelLoadError(
                f"The tokenizer decodes in the way {kind!r}, which is not supported.",
                remedy="Name another one with --tokenizer.",
            )
    return _Decoding(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        drops_leading_space=drops,
    )


def _byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:  # an entry that was put into the vocabulary as it is
        return token.encode()


# -- loading


def load_tokenizer(source: ModelSource, resolved: Resolved) -> Tokenizer | None:
    """The model's tokenizer, or the one that --tokenizer names; None where the model has none (prompts are ids then).

    Raises `ModelLoadError` with a remedy for one that can't be read.
    """
    path, metadata = source.path, source.metadata
    if resolved.tokenizer is not None:
        path, metadata = _named(resolved.tokenizer)
    trust = bool(getattr(resolved, "trust_remote_code", False))
    found = _from_gguf(metadata) if "tokenizer.ggml.model" in metadata else _from_files(path, trust)
    if found is None:
        if resolved.tokenizer is not None:
            raise ModelLoadError(
                f"There is no tokenizer in {resolved.tokenizer}.", remedy="Name a directory that holds tokenizer.json."
            )
        return None
    if resolved.chat_template is not None:
        found["chat_templates"] = {"default": _template_text(resolved.chat_template)}
    tokenizer = Tokenizer(
        **found, special_tokens_in_content=bool(getattr(resolved, "special_tokens_in_content", False))
    )
    if resolved.chat_template is not None:
        assert tokenizer.chat_template is not None
        tokenizer.chat_template.check()
    return tokenizer


def _named(name: str) -> tuple[Path, dict[str, Any]]:
    """(path, GGUF key-values) of the tokenizer that was asked for by a path or a hub id."""
    from stenograph.loading.source import find_path

    path = find_path(name)
    if path.is_file() and path.suffix == ".gguf":
        from stenograph.loading.gguf_file import GGUFFile

        return path, GGUFFile(path).metadata
    return path, {}


def _template_text(given: str) -> str:
    """A file's text, or the template itself."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ModelLoadError(
            f"The chat template {given} cannot be read: {reason}.", remedy="Name a file with --chat-template."
        ) from None


def _from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """`Tokenizer`'s arguments."""
    from stenograph.tokenizer.gguf import adds_bos, build_tokenizer

    backend = build_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            named[name] = tokens[index]
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1 :] or "default": text for key, text in metadata.items() if key.startswith(prefix)}
    return {
        "backend": backend,
        "special_tokens": named,
        "chat_templates": {name: text for name, text in templates.items() if isinstance(text, str)},
        "add_bos": adds_bos(metadata),
        "add_eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def _from_files(path: Path, trust_remote_code: bool) -> dict[str, Any] | None:
    """`Tokenizer`'s arguments from a directory in the Hugging Face layout, or from a tokenizer.json itself."""
    directory = path if path.is_dir() else path.parent
    file = path if path.name.endswith("tokenizer.json") else directory / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the package raises bare exceptions
            raise ModelLoadError(
                f"{file.name} cannot be read: {error}.", remedy="Fetch it again, or name another one with --tokenizer."
            ) from None
    elif any(any(directory.glob(name)) for name in SLOW_FILES):
        backend = _converted(directory, trust_remote_code)
    else:
        return None
    settings = _optional_json(directory / "tokenizer_config.json")
    named = _named_tokens(_optional_json(directory / "special_tokens_map.json")) | _named_tokens(settings)
    _add_missing(backend, settings, named)
    flags = {key: settings.get(f"{key}_token") for key in ("add_bos", "add_eos")}
    return {
        "backend": backend,
        "special_tokens": named,
        "chat_templates": _templates(directory, settings),
        **{key: flag if isinstance(flag, bool) else None for key, flag in flags.items()},
    }


def _converted(directory: Path, trust_remote_code: bool) -> Backend:
    """Other formats, by way of transformers: slow to start, but it knows them all."""
    if "auto_map" in _optional_json(directory / "tokenizer_config.json") and not trust_remote_code:
        raise ModelLoadError(
            f"The tokenizer in {directory.name} is code of its own, which is not run unasked.",
            remedy="Read it and set --trust-remote-code, or name another one with --tokenizer.",
        )
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code).backend_tokenizer
    except Exception as error:  # whatever a converter, or code that came with the model, may raise
        raise ModelLoadError(
            f"The tokenizer in {directory.name} cannot be converted: {' '.join(str(error).split())[:200]}.",
            remedy="Add a tokenizer.json, or name another one with --tokenizer.",
        ) from error


def _optional_json(path: Path) -> dict[str, Any]:
    from stenograph.loading.source import read_json

    return read_json(path) if path.is_file() else {}


def _text_of_token(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text_of_token(settings.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in found.items() if text is not None}


def _add_missing(backend: Backend, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """tokenizer_config.json may tell of added tokens that tokenizer.json lacks, and which tokens are special."""
    from tokenizers import AddedToken

    given = settings.get("added_tokens_decoder")
    entries = {int(k): e for k, e in (given if isinstance(given, Mapping) else {}).items() if k.isdecimal()}
    known = backend.get_added_tokens_decoder()
    for index, entry in sorted(entries.items()):
        text = _text_of_token(entry)
        if text and index not in known and backend.token_to_id(text) in (None, index):
            flags = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            add = backend.add_special_tokens if flags["special"] else backend.add_tokens
            add([AddedToken(text, **flags)])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    texts: list[str | None] = [*named.values()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = settings.get(key)
        texts += map(_text_of_token, extra if isinstance(extra, list) else ())
    for text in texts:
        if text and text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own counts more than an entry of tokenizer_config.json."""
    found: dict[str, str] = {}
    in_json = _optional_json(directory / "chat_template.json").get("chat_template")
    for given in (settings.get("chat_template"), in_json):
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, list):
            found |= {str(e.get("name")): str(e.get("template")) for e in given if isinstance(e, Mapping)}
    more = directory / "additional_chat_templates"
    files = {"default": directory / "chat_template.jinja"} | {p.stem: p for p in sorted(more.glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            found[name] = _template_text(str(file))
    return found
