"""Command lines found in texts: discussions of users and pages of the documentation."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator

QUOTE = re.compile(r"^\s*(?:>\s?)+")
CONTINUED = re.compile(r"(?:^|\s)[\\^`]\s*$")
END = re.compile(r"(?:^|\s)(?:\|{1,2}|&{1,2}|;|\d?>>?(?:&\d)?|<)(?:\s|$|/)|`|</?\w+>")
COMPUTED = re.compile(r"\$\(\((.*?)\)\)")
VARIABLE = re.compile(r"\$\{?\w+\}?|%\w+%|\$\([^()]*\)")


def joined_lines(text: str) -> Iterator[str]:
    """Lines without the marks of quotations; those that end in a backslash, `^` or a backtick go on in the next one.

    Comment lines inside of a command, which users switch options off with, are left out.
    """
    pending = ""
    for line in html.unescape(text).splitlines():
        bare = QUOTE.sub("", line).rstrip()
        if pending and bare.lstrip().startswith("#"):
            continue
        whole = f"{pending} {bare.strip()}" if pending else bare
        pending = CONTINUED.sub("", whole) if CONTINUED.search(whole) else ""
        if not pending:
            yield whole
    if pending:
        yield pending


def invocations(text: str, program: str) -> Iterator[tuple[str, list[str]]]:
    """Tool and arguments of every call of a program in a text; what comes before the program does not matter.

    Variables and computed numbers become `1`. program: a regular expression whose first group is the tool.
    """
    pattern = re.compile(rf"(?:^|[\s/\\`\"'(]){program}(?=[\s`]|$)")
    for line in joined_lines(text):
        for match in pattern.finditer(line):
            rest = VARIABLE.sub("1", COMPUTED.sub("1", line[match.end() :]))
            try:
                yield match[1], shlex.split(END.split(rest, maxsplit=1)[0], comments=True)
            except ValueError:  # prose with an apostrophe
                continue
