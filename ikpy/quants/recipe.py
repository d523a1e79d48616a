"""Custom rules ``regex=type`` that replace the policy's choice per tensor (tools 2.4).

A recipe is one rule per line or several separated by commas; ``#`` starts a comment, blank lines and a comma at
the end of a line are ignored. The first rule whose regular expression is found in the tensor name applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ikpy.errors import UsageError
from ikpy.quants import registry

_COMMENT = re.compile(r"(^|\s)#.*$")


@dataclass
class Rule:
    """One rule; ``matched`` counts tensors it decided, ``shadowed`` those an earlier rule took from it."""

    pattern: str
    type: str
    regex: re.Pattern[str] = field(repr=False)
    matched: int = 0
    shadowed: int = 0


def parse_rules(text: str) -> list[Rule]:
    """Rules of a recipe text; UsageError naming the item for a missing ``=``, unknown type or bad regex."""
    rules = []
    for line in text.splitlines():
        items = _COMMENT.sub("", line).strip().rstrip(",").split(",")
        if items != [""]:
            rules += [_parse_rule(item.strip()) for item in items]
    return rules


def _parse_rule(item: str) -> Rule:
    pattern, equals, type_name = item.partition("=")
    if not equals or not pattern:
        raise UsageError(f"Invalid custom quantization input {item}")
    try:
        row = registry.by_name(type_name.strip())
    except UsageError as error:
        raise UsageError(
            f"Invalid quantization type '{type_name}' in custom quantization input {item}"
            f"{str(error).partition(chr(39) + type_name.strip() + chr(39))[2]}"
        ) from None
    if row.activation_only:
        raise UsageError(f"type {row.name} in custom quantization input {item} cannot be stored in a file")
    try:
        return Rule(pattern, row.name, re.compile(pattern))
    except re.error as error:
        raise UsageError(f"regular expression of custom rule {item} is invalid: {error}") from None


class Recipe:
    """An ordered list of rules that counts what each of them decided."""

    def __init__(self, rules: Iterable[Rule] = ()):
        self.rules = list(rules)

    def type_for(self, name: str) -> str:
        """Type of the first rule found in ``name``, or "" if none is."""
        chosen = ""
        for rule in self.rules:
            if rule.regex.search(name):
                if chosen:
                    rule.shadowed += 1
                else:
                    rule.matched += 1
                    chosen = rule.type
        return chosen

    def warnings(self) -> list[str]:
        """One line for each rule that decided nothing."""
        lines = []
        for rule in self.rules:
            if rule.matched:
                continue
            reason = (
                f"its {rule.shadowed} tensors match earlier rules"
                if rule.shadowed
                else "it matches no tensor that is converted"
            )
            lines.append(f"custom rule {rule.pattern}={rule.type} has no effect: {reason}")
        return lines
