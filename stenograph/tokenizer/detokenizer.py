"""Tokens to text as they come: whole characters only, and nothing that may still turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from stenograph.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Text of one answer, piece by piece. The joined pieces equal `Tokenizer.decode` of all ids at once.

    Bytes of an unfinished character are held back until the rest comes; what never becomes a character ends as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # SentencePiece marks a leading space on first words; it counts as text only where something stands before it.
        self._at_start = tokenizer.strips_leading_space and not prompt_token_ids

    def add(self, ids: Iterable[int]) -> str:
        raw = b""
        for token in ids:
            if self._skip and token in self._tokenizer.special_ids:
                continue
            piece = self._tokenizer.token_bytes(token)
            if self._at_start and piece:
                piece, self._at_start = piece.removeprefix(b" "), False
            raw += piece
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What is still held back, when no more tokens come."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Finds the first of several stop strings in text that comes in pieces, however it is cut.

    The match is the one that is complete first; of two that are complete at the same character, the longer.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert stops and all(stops)
        self._stops, self._include = tuple(stops), include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ended it or None)."""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return held[: end if self._include else start], stop
        keep = self._longest_beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
