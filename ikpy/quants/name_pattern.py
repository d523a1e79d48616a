"""Regular expressions for tensor names, in the flavour that rules are written in (ECMAScript)."""

from __future__ import annotations

import re

POSIX_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""Classes that Python lacks: it would read `[[:digit:]]` as a set of these letters followed by a bracket."""
CLASS = re.compile(rf"\[:({'|'.join(POSIX_CLASSES)}):\]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled expression, which `search` looks for in names. Raises re.error."""
    return re.compile(CLASS.sub(lambda match: POSIX_CLASSES[match[1]], pattern))
