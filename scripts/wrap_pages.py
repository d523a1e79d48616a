"""Wraps the prose of Markdown pages at 120 columns: python scripts/wrap_pages.py docs/server.md README.md

Tables, code, headings and what stands between marker lines (`<!-- ...: begin -->`) stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH = 120
LONGEST_CODE = 90
"""Code of more characters may be broken at blanks, as paragraphs of one command line need it."""
FIXED = re.compile(r"\s*\||#|<|!\[| {4}(?! *[-*] )")
ITEM = re.compile(r"(\s*)(?:[-*]|\d+\.) ")
BLOCK_SIGN = re.compile(r"[-+*>|#]+|\d+[.)]|=+|~+")
"""What would begin a list, a quotation or a heading at the start of a line."""


def words(text: str) -> list[str]:
    """Parts that stay together: words, and code in backticks with the blanks in it."""
    found = [""]
    for part in re.split(r"(`[^`]*`)", text):
        if part.startswith("`") and len(part) <= LONGEST_CODE:
            found[-1] += part
        else:
            first, *rest = part.split(" ")
            found[-1] += first
            found += rest
    return [word for word in found if word]


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """Lines of a paragraph or item, the first one behind ``first``, the others behind ``rest``."""
    lines, line = [], ""
    for word in words(text):
        longer = f"{line} {word}" if line else (rest if lines else first) + word
        if line and len(longer) > WIDTH and not BLOCK_SIGN.fullmatch(word):
            lines.append(line)
            longer = rest + word
        line = longer
    return [*lines, line]


def rewrapped(page: str) -> str:
    lines, done = page.split("\n"), []
    fenced = marked = False
    while lines:
        line = lines.pop(0)
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        marked = (marked or line.endswith(": begin -->")) and not line.endswith(": end -->")
        if fence or fenced or marked or not line.strip() or FIXED.match(line):
            done.append(line)
            continue
        item = ITEM.match(line)
        first = item[0] if item else line[: len(line) - len(line.lstrip())]
        block = [line[len(first) :]]
        while lines and lines[0].strip() and not re.match(r"\s*(?:\||#|<|```)", lines[0]) and not ITEM.match(lines[0]):
            block.append(lines.pop(0).strip())
        done += wrapped(" ".join(block), first, " " * len(first))
    return "\n".join(done)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(rewrapped(page.read_text()))


if __name__ == "__main__":
    main()
