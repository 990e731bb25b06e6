"""Text <-> token ids, and conversations -> token ids, over a `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stenograph.errors import ModelLoadError, RequestError
from stenograph.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

    from stenograph.loading.source import ModelSource

BREAK = "\ufdd0"  # a Unicode noncharacter: put inside control-token text to break it up, taken out before encoding
SPACE = "▁"  # SentencePiece's mark for a space


class Tokenizer:
    """
    backend        the `tokenizers.Tokenizer`
    chat_template  Jinja source, or None
    tokens         "bos_token" -> its text, and so on, as templates see them
    eos_token_ids  the tokenizer's own end ids
    special_tokens_in_content  whether control-token text in messages becomes control tokens (for trusted callers)
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        tokens: Mapping[str, str] | None = None,
        special_tokens_in_content: bool = False,
    ) -> None:
        self.backend = backend
        self.tokens = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": "", **(tokens or {})}
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        eos = backend.token_to_id(self.tokens["eos_token"]) if self.tokens["eos_token"] else None
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        decoder = repr(backend.decoder)
        self._byte_level = "ByteLevel" in decoder
        self.strips_leading_space = "Strip(" in decoder or "Metaspace(" in decoder
        self._bytes: dict[int, bytes] = {}
        self._template: ChatTemplate | None = None
        self._literal: tokenizers.Tokenizer | None = None
        self._special_text = None
        if not special_tokens_in_content and self.special_ids:
            texts = sorted((self._added[i] for i in self.special_ids), key=len, reverse=True)
            self._special_text = re.compile("|".join(map(re.escape, texts)))

    # -- text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; control-token text becomes control tokens. `add_special_tokens`: as the model wants, such as BOS."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        from stenograph.tokenizer.detokenizer import Detokenizer

        detokenizer = Detokenizer(self, (), skip_special_tokens)
        return detokenizer.add(ids) + detokenizer.finish()

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None beyond the vocabulary."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to the text; b"" for ids beyond the vocabulary (padded models have some)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token by itself as text, U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:  # a token outside the byte alphabet stands for itself
                return token.encode()
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode()

    # -- conversations

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Token ids of a conversation. Control-token text inside messages stays plain text.

        Raises `RequestError` where there is no template, or with the template's own words where it refuses.
        """
        hostile = False
        if self._special_text is not None:
            messages = [_map_strings(m, self._break_up) for m in messages]
            tools = [_map_strings(t, self._break_up) for t in tools] if tools else None
            hostile = any(BREAK in repr_of for repr_of in _strings([messages, tools]))
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
        return self._encode_broken(text) if hostile else self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The conversation as text."""
        if self.chat_template is None:
            raise RequestError(
                "This model has no chat template.",
                param="messages",
                remedy="Start the server with --chat-template FILE, or use completions.",
            )
        if self._template is None:
            self._template = ChatTemplate(self.chat_template, self.tokens)
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)

    def _break_up(self, text: str) -> str:
        assert self._special_text is not None
        text = text.replace(BREAK, "")
        return self._special_text.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)

    def _encode_broken(self, text: str) -> list[int]:
        """Encodes a rendered template: whole control tokens are its own; broken-up ones came from a message."""
        assert self._special_text is not None
        if self._literal is None:
            self._literal = type(self.backend).from_str(self.backend.to_str())
            self._literal.encode_special_tokens = True  # spell control-token text out in ordinary tokens
        ids: list[int] = []
        at = 0
        for match in self._special_text.finditer(text):
            ids += self._encode_literal(text[at : match.start()])
            ids.append(self.backend.token_to_id(match[0]))
            at = match.end()
        return ids + self._encode_literal(text[at:])

    def _encode_literal(self, text: str) -> list[int]:
        assert self._literal is not None
        text = text.replace(BREAK, "")
        return list(self._literal.encode(text, add_special_tokens=False).ids) if text else []


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: inner if key in ("role", "type") else _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(inner, change) for inner in value]
    return value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [text for one in inner for text in _strings(one)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet, character -> byte: printable Latin-1 stands for itself, the rest lies above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


# -- loading


def load_tokenizer(source: ModelSource, resolved: Any = None) -> Tokenizer | None:
    """The model's tokenizer, or the one that `resolved.tokenizer` names; None where there is none at all.

    Raises `ModelLoadError` for one that cannot be read.
    """
    override = getattr(resolved, "tokenizer", None)
    template = _template_override(getattr(resolved, "chat_template", None))
    in_content = bool(getattr(resolved, "special_tokens_in_content", False))
    if override:
        from stenograph.loading.source import find_path

        path = find_path(override)
        if path.is_file():
            path = path.parent
        found = _from_directory(path, trust_remote_code=bool(getattr(resolved, "trust_remote_code", False)))
        if found is None:
            raise ModelLoadError(f"{override} holds no tokenizer.", remedy="Name a directory with a tokenizer.json.")
    elif source.metadata:
        found = _from_gguf(source.metadata)
    else:
        found = _from_directory(source.path, trust_remote_code=bool(getattr(resolved, "trust_remote_code", False)))
    if found is None:
        return None
    backend, own_template, tokens = found
    return Tokenizer(
        backend, chat_template=template or own_template, tokens=tokens, special_tokens_in_content=in_content
    )


Found = tuple["tokenizers.Tokenizer", str | None, dict[str, str]]


def _from_gguf(metadata: Mapping[str, Any]) -> Found:
    from stenograph.tokenizer.gguf import build_tokenizer

    backend = build_tokenizer(metadata)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    vocabulary = metadata["tokenizer.ggml.tokens"]
    tokens = {
        name: vocabulary[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in names.items()
        if metadata.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    return backend, metadata.get("tokenizer.chat_template"), tokens


def _from_directory(path: Path, *, trust_remote_code: bool) -> Found | None:
    import tokenizers

    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).is_file():
            settings |= _read_settings(path / name)
    if (path / "tokenizer.json").is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the package raises plain Exception
            raise ModelLoadError(f"tokenizer.json cannot be read: {error}.", remedy="Fetch the file again.") from error
    elif any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "tiktoken.model")):
        backend = _converted(path, trust_remote_code=trust_remote_code)
    else:
        return None
    tokens = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(settings.get(name)))
    }
    return backend, _directory_template(path, settings), tokens


def _converted(path: Path, *, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Older files, through transformers."""
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, use_fast=True)
        return loaded.backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"The tokenizer cannot be read ({type(error).__name__}).", remedy="Provide a tokenizer.json."
        ) from error


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None and (path / "chat_template.json").is_file():
        template = _read_settings(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _template_override(option: str | None) -> str | None:
    """--chat-template: a file's contents, or the template itself."""
    if option is None:
        return None
    if "{" in option:
        return option
    path = Path(option).expanduser()
    if not path.is_file():
        raise ModelLoadError(f"The chat template {option!r} does not exist.", remedy="Name a Jinja file.")
    return path.read_text(encoding="utf-8")


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read.", remedy="Fetch the file again.") from error
    return value if isinstance(value, dict) else {}
