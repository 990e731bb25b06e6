"""Stop strings in text that comes in pieces: nothing is shown that may still turn out to begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string to be complete, whatever pieces the text comes in; holds back what may begin one.

    Of two that end with the same character, the longer one counts. `include` keeps the match in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._matched = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can be shown, the stop string that ended the answer or None). After a match nothing follows."""
        if self._matched:
            return "", None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._matched, self._held = True, ""
            return text[: end if self._include else start], stop
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
