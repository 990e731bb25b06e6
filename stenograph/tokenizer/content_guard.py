"""Keeps the text of control tokens inside message content plain text, so that no content can forge a turn.

A template sees the content of messages, and may trim, split or escape it; in what it renders, a marker of the
template's and one that a user typed look alike. So a break (characters that nobody can guess) goes into every marker
that a user typed before the template is rendered. Afterwards a marker without a break is the template's. It is renamed
to a name that nobody can guess either, the breaks are taken out, and a second tokenizer encodes the whole: one that
knows control tokens by those names alone. Cutting, normalisation and neighbours are what they are for any other text.

Conversations without such text, nearly all, take none of these steps.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Private-use characters, followed by digits alone: no filter of a template changes them.
NAME, BREAK = "\U0010f000", "\U0010f001"


def encode_plain(backend: Tokenizer, text: str) -> list[int]:
    """Ids of a text alone. Of the backend's ways to encode, this one lets other threads run meanwhile."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def new_break() -> str:
    return f"{BREAK}{secrets.randbelow(10**18)}{BREAK}"


class ContentGuard:
    """For one tokenizer; `control` is the text of its control tokens by id."""

    def __init__(self, backend: Tokenizer, control: Mapping[int, str]) -> None:
        self._backend = backend
        self._ids = {text: index for index, text in control.items() if text}
        self._lock = threading.Lock()
        self._renamed: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None

    def is_suspect(self, value: Any) -> bool:
        """Whether a text inside `value` (nested dicts and lists) holds a marker, or ends where one has begun."""
        if isinstance(value, str):
            return self._markers.search(value) is not None or bool(self._begun(value))
        if isinstance(value, Mapping):
            return any(self.is_suspect(key) or self.is_suspect(inner) for key, inner in value.items())
        if isinstance(value, (list, tuple)):
            return any(map(self.is_suspect, value))
        return False

    def break_markers(self, value: Any, break_: str) -> Any:
        """`value` with a break after the first character of every marker."""
        if isinstance(value, str):
            # Looking ahead finds markers that begin inside others, too.
            cuts = {found.start() + 1 for found in re.finditer(f"(?={self._markers.pattern})", value)}
            cuts.update(len(value) - length + 1 for length in self._begun(value))
            edges = [0, *sorted(cuts), len(value)]
            return break_.join(value[a:b] for a, b in pairwise(edges))
        if isinstance(value, Mapping):
            return {self.break_markers(k, break_): self.break_markers(inner, break_) for k, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.break_markers(inner, break_) for inner in value]
        return value

    def encode(self, rendered: str, break_: str) -> list[int]:
        """Ids of a rendered template: markers without a break are control tokens, all else is plain text."""
        backend, names, ids = self._with_secret_names()
        trusted = re.compile(f"(?:{self._markers.pattern})(?!{break_})")
        text = trusted.sub(lambda found: names[found[0]], rendered).replace(break_, "")
        encoded: list[int] = []
        for index in encode_plain(backend, text):
            if index in self._texts:  # some vocabularies can spell a control token out of plain text
                marker = self._texts[index]
                for part in (marker[0], marker[1:]):
                    encoded += backend.encode(part, add_special_tokens=False).ids
            else:
                encoded.append(ids.get(index, index))
        return encoded

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {index: text for text, index in self._ids.items()}

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:length] for text in self._ids for length in range(2, len(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._beginnings), default=0)

    def _begun(self, text: str) -> list[int]:
        """Lengths of the ends of `text` that begin a marker: what the template puts after it could complete one."""
        return [n for n in range(2, min(self._longest, len(text)) + 1) if text[-n:] in self._beginnings]

    def _with_secret_names(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """(the second tokenizer, secret name by marker, id by the second tokenizer's id). Made when first needed."""
        with self._lock:
            if self._renamed is None:
                self._renamed = self._rename()
            return self._renamed

    def _rename(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        from tokenizers import AddedToken, Tokenizer

        second = Tokenizer.from_str(self._backend.to_str())
        second.encode_special_tokens = True  # their own names are plain text now
        known = self._backend.get_added_tokens_decoder()
        secret = secrets.token_hex(8)
        names = {text: f"{NAME}{secret}.{index}{NAME}" for text, index in self._ids.items()}
        second.add_tokens(
            [
                AddedToken(name, lstrip=known[i].lstrip, rstrip=known[i].rstrip, normalized=False, special=False)
                for name, i in zip(names.values(), self._ids.values(), strict=True)
            ]
        )
        ids = {}
        for text, name in names.items():
            index = second.token_to_id(name)
            assert index is not None
            ids[index] = self._ids[text]
        return second, names, ids
