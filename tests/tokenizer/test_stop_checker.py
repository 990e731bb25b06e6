"""Stop strings are found in any cut of the text, and nothing of them leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.tokenizer.stop_checker import StopChecker


def search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads character by character until one stop string is complete; the longest where several are."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(text: str, stops: list[str], include: bool, cuts: list[int]) -> tuple[str, str | None]:
    checker, shown, match = StopChecker(stops, include), "", None
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for a, b in pairwise(edges):
        more, found = checker.feed(text[a:b])
        shown, match = shown + more, match or found
    return shown + checker.flush(), match


@given(
    st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(), st.lists(st.integers(0, 30), max_size=12),
)  # fmt: skip
def test_any_cut_finds_what_reading_character_by_character_finds(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    assert feed(text, stops, include, cuts) == search(text, stops, include)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    shown, match = StopChecker(stops).feed(text)
    if match is None:
        held = text[len(shown) :]
        assert text.startswith(shown) and (not held or any(stop.startswith(held) for stop in stops))


def test_a_stop_string_over_several_tokens() -> None:
    """S-11."""
    checker = StopChecker(["O P Q"])
    assert [checker.feed(piece) for piece in ["L", " M", " N", " ", "O", " P"]] == [
        ("L", None), (" M", None), (" N", None), (" ", None), ("", None), ("", None),
    ]  # fmt: skip
    assert checker.feed(" Q R") == ("", "O P Q")
    assert checker.feed(" S") == ("", None) and checker.flush() == ""


def test_a_stop_string_that_starts_inside_a_token() -> None:
    assert StopChecker(["lo w"]).feed("hello world") == ("hel", "lo w")
    assert StopChecker(["lo w"], include=True).feed("hello world") == ("hello w", "lo w")


@pytest.mark.parametrize(("stops", "match"), [(["b", "abc"], "b"), (["bc", "abc"], "abc"), (["abc", "bc"], "abc")])
def test_of_two_matches_the_first_to_end_counts(stops: list[str], match: str) -> None:
    assert StopChecker(stops).feed("xabcx")[1] == match


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    checker = StopChecker(["aab"])
    assert checker.feed("aa") == ("", None)
    assert checker.feed("a") == ("a", None)  # the last two may still begin it
    assert checker.feed("c") == ("aac", None)
    assert checker.feed("a") == ("", None) and checker.flush() == "a" and checker.flush() == ""
