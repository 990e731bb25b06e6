"""Tokens to text while they arrive.

How an answer is cut never depends on how it came: the pieces of a stream join to the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stenograph.tokenizer.tokenizer import Tokenizer

LONGEST_PREFIX = 3  # bytes of a UTF-8 character that still lacks one


class Detokenizer:
    """Text of one sequence, continuing its prompt's: `decode(prompt + answer) == decode(prompt) + pieces`.

    A character is emitted once its last byte is there; bytes that can't belong to any character become U+FFFD. A
    character still open when the answer ends is left out, as `Tokenizer.decode` leaves it out: nobody can read it.
    A prompt that ends inside a character (token ids can) lends its bytes to the first one of the answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._drops_space = tokenizer.drops_leading_space  # as long as there is no text yet
        self._open = b""
        self._enter(prompt_token_ids)

    def add(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        raw = b"".join(map(self._bytes, token_ids))
        if not raw:
            return ""
        data = self._open + raw
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._open = data[used:]
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Text that only the end of the sequence settles: none, since an open character is left out."""
        self._open = b""
        return ""

    def _bytes(self, token_id: int) -> bytes:
        if self._skip and token_id in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _enter(self, prompt: Sequence[int]) -> None:
        """Takes up where the prompt's text ends: its last bytes settle that, and whether it has a text at all."""
        tail = b""
        for token_id in reversed(prompt):
            tail = self._bytes(token_id) + tail
            if len(tail) >= LONGEST_PREFIX:
                break
        if tail:
            self._drops_space = False
        for length in range(1, min(LONGEST_PREFIX, len(tail)) + 1):
            _, used = codecs.utf_8_decode(tail[-length:], "replace", False)
            if used == 0:
                self._open = tail[-length:]
