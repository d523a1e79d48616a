"""Custom rules ``regex=type`` that replace the policy's choice per tensor (quantize.md#recipes), and files of them.

A text recipe is one rule per line or several separated by commas; ``#`` starts a comment, blank lines and empty
items between commas are ignored. A YAML recipe holds the rules under ``rules`` (a mapping, or a list of mappings),
where a regular expression may contain commas, and may set options of the quantizer beside them. The first rule whose
regular expression is found in the tensor name applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikpy.errors import UsageError
from ikpy.quants import registry
from ikpy.quants.name_pattern import compile_pattern

_COMMENT = re.compile(r"(^|\s)#.*$")
# That of `(?=` and `(?<=`, which look around, is none between an expression and its type.
_EQUALS = re.compile(r"(?<!\(\?)(?<!\(\?<)=")
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass
class SizeTarget:
    """A wanted size: bytes of the output files or bits per weight of all tensors, 0 = not given.

    ``types``: names of the types to choose from, empty = a good selection.
    """

    nbytes: int = 0
    bits_per_weight: float = 0.0
    types: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """Whether there is a size."""
        return self.nbytes > 0 or self.bits_per_weight > 0


@dataclass
class Rule:
    """One rule and what it did.

    ``matched`` counts tensors it decided, of ``nbytes`` in the output; ``shadowed`` those that ``shadowed_by`` and
    other earlier rules took from it; ``overruled`` decided ones whose type another option replaced.
    """

    pattern: str
    type: str
    regex: re.Pattern[str] = field(repr=False)
    matched: int = 0
    nbytes: int = 0
    overruled: int = 0
    shadowed: int = 0
    shadowed_by: str = ""

    def __str__(self) -> str:
        return f"{self.pattern}={self.type}"


def make_rule(pattern: str, type_name: str) -> Rule:
    """A rule; UsageError for a type that is unknown or never stored, and for a bad regular expression."""
    item = f"{pattern}={type_name}"
    try:
        row = registry.by_name(type_name)
    except UsageError as error:
        hint = str(error).partition(f"'{type_name}'")[2]
        raise UsageError(f"Invalid quantization type '{type_name}' in custom quantization input {item}{hint}") from None
    if row.activation_only:
        raise UsageError(f"type {row.name} in custom quantization input {item} cannot be stored in a file")
    try:
        return Rule(pattern, row.name, compile_pattern(pattern))
    except re.error as error:
        raise UsageError(f"regular expression of custom rule {item} is invalid: {error}") from None


def rule_items(text: str) -> list[str]:
    """Items between commas; a comma in an expression's open brackets, as in `blk\\.\\d{1,2}`, divides none."""
    items: list[str] = []
    item = ""
    for part in text.split(","):
        item = f"{item},{part}" if item else part
        is_open = any(item.count(a) > item.count(b) for a, b in ("()", "[]", "{}"))
        if _EQUALS.search(item) or not is_open:
            items.append(item.strip())
            item = ""
    return [item for item in [*items, item.strip()] if item]


def parse_rules(text: str) -> list[Rule]:
    """Rules of a recipe text; UsageError naming the item for a missing ``=``, unknown type or bad regex.

    A text of one line whose comment holds rules is refused: its lines were joined and would be lost. So is a text of
    blanks and commas alone, which a misspelled variable of the shell gives.
    """
    if not text.replace(",", "").strip():
        raise UsageError(
            f"Invalid custom quantization input '{text.strip()}': it is empty; expected REGEX=TYPE or the name of a "
            "file of rules"
        )
    comment = _COMMENT.search(text)
    if comment and "\n" not in text.strip() and any("=" in item for item in comment[0].split(",")[1:]):
        raise UsageError(
            f"Invalid custom quantization input {comment[0].strip()}: the rules behind this comment are on its line; "
            "keep line ends between comments and rules, or leave comments out"
        )
    rules = []
    for line in text.splitlines():
        rules += [_parse_rule(item) for item in rule_items(_COMMENT.sub("", line))]
    return rules


def _parse_rule(item: str) -> Rule:
    equals = _EQUALS.search(item)
    if not equals or not item[: equals.start()].strip():
        raise UsageError(
            f"Invalid custom quantization input {item}; expected REGEX=TYPE or the name of a file of rules"
        )
    # No name contains blanks.
    return make_rule(item[: equals.start()].strip(), item[equals.end() :].strip())


@dataclass
class RecipeFile:
    """Contents of a recipe file; ``options`` are command line options by name, without the dashes in front."""

    rules: list[Rule]
    options: dict[str, str] = field(default_factory=dict)


def read_recipe(path: str) -> RecipeFile:
    """Read a recipe, YAML if the name ends so; UsageError naming the file for anything that is wrong in it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read recipe {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if path.lower().endswith(YAML_SUFFIXES):
            return _parse_yaml(text)
        return RecipeFile(parse_rules(text))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _parse_yaml(text: str) -> RecipeFile:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(f"{where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("rules", []), dict | list):
        raise UsageError("a YAML recipe is a mapping with the key 'rules' (a mapping regex: type, or a list of them)")
    options = {}
    for key, value in content.items():
        if key == "rules":
            continue
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise UsageError(f"option {key!r} of a recipe needs a single value")
        options[key.replace("_", "-").removeprefix("--")] = str(value)
    return RecipeFile(list(_yaml_rules(content.get("rules", []))), options)


def _yaml_rules(rules: Any) -> Iterable[Rule]:
    for group in rules if isinstance(rules, list) else [rules]:
        if isinstance(group, str):
            yield from parse_rules(group)
            continue
        if not isinstance(group, dict):
            raise UsageError(f"rule {group!r} is no 'regex: type'")
        for pattern, type_name in group.items():
            if not isinstance(pattern, str) or not isinstance(type_name, str):
                raise UsageError(f"rule {pattern!r}: {type_name!r} is no 'regex: type'")
            yield make_rule(pattern, type_name)


class Recipe:
    """An ordered list of rules that counts what each of them decided."""

    def __init__(self, rules: Iterable[Rule] = ()):
        self.rules = list(rules)

    def restart(self) -> None:
        """Forget all counts."""
        for rule in self.rules:
            rule.matched = rule.nbytes = rule.overruled = rule.shadowed = 0
            rule.shadowed_by = ""

    def match(self, name: str) -> Rule | None:
        """The first rule found in ``name``; nothing is counted."""
        return next((rule for rule in self.rules if rule.regex.search(name)), None)

    def type_for(self, name: str) -> str:
        """Type of the first rule found in ``name``, or "" if none is; counts it."""
        chosen = None
        for rule in self.rules:
            if not rule.regex.search(name):
                continue
            if chosen is None:
                chosen = rule
                rule.matched += 1
            else:
                rule.shadowed += 1
                rule.shadowed_by = rule.shadowed_by or str(chosen)
        return chosen.type if chosen else ""

    def report(self) -> list[str]:
        """One line per rule: how many tensors it decided and their size, and how many earlier rules took."""
        lines = []
        for rule in self.rules:
            line = f"custom rule {rule.pattern} -> {rule.type}: {rule.matched} tensors, {rule.nbytes / 2**20:.2f} MiB"
            if rule.matched and rule.shadowed:
                line += f"; {rule.shadowed} more match earlier rules (first {rule.shadowed_by})"
            lines.append(line)
        return lines

    def warnings(self) -> list[str]:
        """One line for each rule without effect, with the reason."""
        lines = []
        for rule in self.rules:
            if rule.matched > rule.overruled:
                continue
            if rule.matched:
                reason = f"options for single tensors decide its {rule.matched} tensors"
            elif rule.shadowed:
                reason = f"its {rule.shadowed} tensors match earlier rules (first {rule.shadowed_by})"
            else:
                reason = "it matches no tensor that is converted"
            lines.append(f"custom rule {rule} has no effect: {reason}")
        return lines
