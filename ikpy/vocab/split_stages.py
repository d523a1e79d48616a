"""What split rules are made of: expressions, each of which cuts the pieces that the one before it left.

Three kinds of expression exist, because the reference runs them differently and the difference is visible in token
ids:

* *exact*: Unicode categories, used for the GPT-2, Llama 3, Qwen 2, Kimi K2 and digit rules;
* *collapsed*: every non-ASCII code point is replaced by one placeholder for its category first, so letter
  case outside ASCII is lost; used for all other expressions that name a category;
* *code point*: no categories; non-ASCII white space reads as vertical tab.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import regex

Cutter = Callable[[str, int, int], Iterator[int]]


@dataclass(frozen=True)
class Stage:
    """One expression of a split rule: ``view`` maps the text 1:1, ``cut`` yields cut offsets in a piece."""

    view: Callable[[str], str]
    cut: Cutter


@dataclass(frozen=True)
class SplitRule:
    """Expressions applied in order, each inside the pieces the previous one left.

    ``whole`` is set when one exact expression alone covers every character.
    """

    stages: tuple[Stage, ...]
    whole: regex.Pattern[str] | None = None

    def split(self, text: str) -> list[str]:
        """Pieces of ``text`` in order; their concatenation is ``text``."""
        if self.whole is not None:
            return self.whole.findall(text)
        cuts = [0, len(text)]
        for stage in self.stages:
            view = stage.view(text)
            new = [0]
            last = 0
            for start, end in itertools.pairwise(cuts):
                if end - start > 1:
                    for at in stage.cut(view, start, end):
                        if at > last:
                            new.append(at)
                            last = at
                if end > last:
                    new.append(end)
                    last = end
            cuts = new
        return [text[start:end] for start, end in itertools.pairwise(cuts)]


class _CategoryTable(dict[int, str]):
    """Translation table filled on demand: code point to its placeholder in the collapsed text."""

    _CLASSES = regex.compile(r"(?P<W>\p{White_Space})|(?P<N>\p{N})|(?P<L>\p{L})|(?P<P>\p{P})|(?P<M>\p{M})|(?P<S>\p{S})")
    _PLACEHOLDER: ClassVar = {"W": "\x0b", "N": "\xd1", "L": "\xd2", "P": "\xd3", "M": "\xd4", "S": "\xd5"}

    def __missing__(self, code: int) -> str:
        match = None if code < 128 else self._CLASSES.match(chr(code))
        kind = match.lastgroup if match else None
        value = chr(code) if code < 128 else self._PLACEHOLDER[kind] if kind else "\xd0"
        self[code] = value
        return value


class _SpaceTable(dict[int, str]):
    """Translation table that reads non-ASCII white space as vertical tab."""

    _SPACE = regex.compile(r"\p{White_Space}")

    def __missing__(self, code: int) -> str:
        char = chr(code)
        value = "\x0b" if code >= 128 and self._SPACE.match(char) else char
        self[code] = value
        return value


_CATEGORIES = _CategoryTable()
_SPACES = _SpaceTable()

# ASCII members and placeholder of each category in the collapsed text; "~" belongs to none.
_COLLAPSED_SETS = {
    "N": "0-9\xd1",
    "L": "A-Za-z\xd2",
    "P": r"!-#%-*,-/:;?@\[-\]_{}" + "\xd3",
    "M": "\xd4",
    "S": r"$+<=>\^`|" + "\xd5",
}


def _expand_categories(pattern: str) -> str:
    r"""Replace every ``\p{X}`` by the members of X in the collapsed text."""
    out: list[str] = []
    pos, in_class = 0, False
    while pos < len(pattern):
        if pattern.startswith(r"\p{", pos):
            close = pattern.index("}", pos)
            members = _COLLAPSED_SETS[pattern[pos + 3]]
            out.append(members if in_class else f"[{members}]")
            pos = close + 1
            continue
        if pattern[pos] == "\\":
            out.append(pattern[pos : pos + 2])
            pos += 2
            continue
        in_class = pattern[pos] == "[" or (in_class and pattern[pos] != "]")
        out.append(pattern[pos])
        pos += 1
    return "".join(out)


def _match_cuts(pattern: re.Pattern[str] | regex.Pattern[str]) -> Cutter:
    """Cuts before and after every match."""

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            yield from match.span()

    return cut


def _identity(text: str) -> str:
    return text


def exact(pattern: str) -> Stage:
    """A stage of an exact expression."""
    return Stage(_identity, _match_cuts(regex.compile(pattern, regex.V1)))


def collapsed(pattern: str) -> Stage:
    """A stage of a collapsed expression."""
    compiled = re.compile(_expand_categories(pattern), re.ASCII)
    return Stage(lambda text: text.translate(_CATEGORIES), _match_cuts(compiled))


def code_points(pattern: str) -> Stage:
    """A stage of an expression on code points."""
    return Stage(lambda text: text.translate(_SPACES), _match_cuts(re.compile(pattern, re.ASCII)))


def digit_groups(runs: str) -> Stage:
    """Cut runs of digits after every group of three counted from the right; not before the first group."""
    pattern = regex.compile(runs)

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            first, last = match.span()
            yield from range(first + ((last - first) % 3 or 3), last + 1, 3)

    return Stage(_identity, cut)


def before_triples(runs: str) -> Stage:
    """Cut before every position of a digit run that a multiple of three digits follows to its end."""
    pattern = regex.compile(runs)

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            first, last = match.span()
            yield from range(first + (last - first) % 3, last, 3)

    return Stage(_identity, cut)


def whole(pattern: str) -> SplitRule:
    """The rule of one exact expression that covers every character."""
    return SplitRule((exact(pattern),), regex.compile(pattern, regex.V1))


def in_order(*stages: Stage) -> SplitRule:
    """The rule of stages, each inside the pieces of those before it."""
    return SplitRule(stages)
