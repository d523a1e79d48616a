"""Patterns of banned text: the same matches as the standard library's, found as early, in bounded time."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikpy.server.ban_patterns import BanPatterns, PatternError, Progress

ATOMS = ["a", "b", ".", "[ab]", "[^a]", "(?:a|bc)", r"\w", r"\W", "(ab)", "é", "(?:|a)"]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,1}?", "{2,}", "+?"]
ROWS = st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)), min_size=1, max_size=4)
PATTERNS = st.lists(ROWS, min_size=1, max_size=2).map(
    lambda rows: "|".join("".join(atom + repeat for atom, repeat in row) for row in rows)
)


def first_match(
    patterns: list[str], text: str, *, ended: bool = False, ignore_case: bool = False
) -> tuple[int, int] | None:
    """Beginning of the first match that is found and length of the text by then, in characters."""
    search, progress = BanPatterns([(pattern, ignore_case) for pattern in patterns]), Progress()
    for n, char in enumerate(text, 1):
        progress, begin = search.feed(progress, char.encode())
        if begin is not None:
            return len(text.encode()[:begin].decode()), n
    begin = search.end(progress) if ended else None
    return None if begin is None else (len(text.encode()[:begin].decode()), len(text))


@settings(max_examples=300, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=2), st.text("abcé \n", max_size=9))
def test_every_match_is_found_when_its_last_character_comes(patterns: list[str], text: str) -> None:
    compiled = [re.compile(pattern) for pattern in patterns]
    places = [(begin, end) for end in range(1, len(text) + 1) for begin in range(end)]
    truth = [place for place in places if any(pattern.fullmatch(text, *place) for pattern in compiled)]
    assert first_match(patterns, text) == next(iter(truth), None)


@settings(max_examples=100, deadline=None)
@given(PATTERNS, st.text("abé☺", max_size=9), st.data())
def test_tokens_may_end_within_characters(pattern: str, text: str, data: st.DataObject) -> None:
    search, content = BanPatterns([(pattern, False)]), text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=4)) | {0, len(content)})
    progress, found = Progress(), False
    for first, last in pairwise(cuts):
        progress, begin = search.feed(progress, content[first:last])
        found |= begin is not None
    assert found == (first_match([pattern], text) is not None)
    assert progress.at == len(content) and progress.pending == b""


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"\bcat\b", "a cat.", (2, 6)),
        (r"\bcat\b", "concat cats", None),
        (r"\bcat\b", "cat", (0, 3)),
        (r"\Bat", "at cat", (4, 6)),
        ("^- ", "x - \n- y", (5, 7)),
        ("[.!]$", "a.b!\nc.", (3, 5)),
        (r"not (just|only) .{1,10}? but", "is not only big but", (3, 19)),
        (r"[\d-]{3}\x41B\.", "12-AB.", (0, 6)),
        (r"[a\]\-z]+\/", "z-]/", (0, 4)),
        ("x{2,3}$", "xxxx", (1, 4)),
    ],
)
def test_places_and_escapes(pattern: str, text: str, found: tuple[int, int] | None) -> None:
    assert first_match([pattern], text, ended=True) == found


def test_case() -> None:
    assert first_match(["[a-f]É"], "xBé", ignore_case=True) == (1, 3)
    assert first_match(["[a-f]É"], "xBé") is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)", "look-around"), ("(?<n>a)", "named groups"), (r"(a)\1", r"\\1 is not supported"), ("a)", "unmatched"),
        ("(a", "missing"), ("[a", "unexpected end"), ("*", "nothing to repeat"), ("a{3,2}", "out of range"),
        ("a{1001}", "out of range"), ("[z-a]", "out of order"), (r"\xZZ", "hexadecimal"), ("a\\", "unexpected end"),
        ("((a{1000}){1000}){1000}", "too large"), ("((){1000}){1000}", "too large"), ("(" * 499, "too deeply"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_used(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        BanPatterns([(pattern, False)])


def test_a_search_keeps_no_more_than_its_states() -> None:
    """Patterns on which backtracking takes exponential time: the state does not grow with the text."""
    search, progress = BanPatterns([("(a|a)*(a+)+(a|aa)+!", False), ("(.*a){12}!", False)]), Progress()
    for _ in range(40):
        progress, begin = search.feed(progress, b"aaaaab ")
        assert begin is None and len(progress.threads) < 60
    assert search.feed(progress, b"a!")[1] == 0
