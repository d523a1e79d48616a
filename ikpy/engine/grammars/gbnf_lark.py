"""GBNF grammars translated for llguidance."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ikpy.engine.grammars.gbnf import (
    LAST_CHARACTER,
    TOO_DEEP,
    CharClass,
    GrammarError,
    Literal,
    Node,
    Ref,
    Rules,
    TokenRef,
    children,
)
from ikpy.engine.grammars.operators import Choice, Group, Repeat

LONGEST_REGEX = 60_000  # characters; larger grammars stay rules instead of becoming one regular expression
DEEPEST, RULE_DEPTH = 3500, 2
"""Nodes of a grammar that stand in each other, rules followed (which count 2). llguidance follows them on the stack:
with about 4700 nodes, or 2700 rules, the process would end."""
EMPTY: Node = Group(())
MOST_EXPANDED = 100 * LONGEST_REGEX  # characters of all parts of an expression: many may hold the same long rule


def to_lark(rules: Rules, token_ids: Mapping[str, Sequence[int]] | None = None) -> str:
    """The grammar in llguidance's Lark dialect.

    A grammar without recursion becomes one regular expression, which the lexer runs fastest. Others become
    rules whose terminals are single characters: a longer terminal would be matched greedily, and the grammar's
    meaning would change. ``token_ids``: ids of the tokens named in the grammar by text. Raises GrammarError for tokens
    that the vocabulary lacks, and for groups nested too deeply.
    """
    try:
        return _lark(rules, token_ids or {})
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None


def _lark(rules: Rules, token_ids: Mapping[str, Sequence[int]]) -> str:
    rules = {name: _simple(node) for name, node in rules.items()}
    head = '%llguidance {"no_forcing": true}\n'
    if not any(_has_tokens(node) for node in rules.values()):
        try:
            return f"{head}start: TEXT\nTEXT: /{_Regex(rules).root()}/\n"
        except (_NotRegular, RecursionError):
            pass  # no single regular expression: every rule becomes one of Lark's
    if _depth(rules) > DEEPEST:
        raise GrammarError("error parsing grammar: rules are nested too deeply in each other")
    names = {name: f"r_{i}" for i, name in enumerate(rules)}
    writer = _RuleWriter(names, token_ids)
    lines = [f"{names[name]}: {writer.node(node)}" for name, node in rules.items()]
    return "\n".join([f"{head}start: {names['root']}", *lines]) + "\n"


def _simple(node: Node) -> Node:
    """A node without empty parts: llguidance takes no {0}, and an empty text that is repeated may end it."""
    if isinstance(node, Literal):
        return node if node.text else EMPTY
    if isinstance(node, Group):
        items = tuple(item for item in map(_simple, node.items) if item != EMPTY)
        return items[0] if len(items) == 1 else Group(items)
    if isinstance(node, Choice):
        return Choice(tuple(map(_simple, node.options)))
    if isinstance(node, Repeat):
        item = _simple(node.item)
        return EMPTY if node.high == 0 or item == EMPTY else Repeat(item, node.low, node.high)
    return node


def _depth(rules: Rules) -> int:
    """How deep nodes stand in each other when every rule is followed where it is used first."""
    open_nodes: list[tuple[int, Iterator[Node]]] = [(0, iter([rules["root"]]))]
    followed, deepest = {"root"}, 0
    while open_nodes:
        depth, nodes = open_nodes[-1]
        node = next(nodes, None)
        if node is None:
            open_nodes.pop()
            continue
        parts, depth = children(node), depth + 1
        if isinstance(node, Ref) and node.name not in followed:
            followed.add(node.name)
            parts, depth = [rules[node.name]], depth - 1 + RULE_DEPTH
        open_nodes.append((depth, iter(parts)))
        deepest = max(deepest, depth)
    return deepest


def _has_tokens(node: Node) -> bool:
    return isinstance(node, TokenRef) or any(_has_tokens(child) for child in children(node))


class _NotRegular(Exception):
    """The grammar recurses, or is too large for one expression."""


class _Regex:
    """Expands rules into one expression."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.done: dict[str, str] = {}
        self.open: set[str] = set()
        self.n_written = 0

    def root(self) -> str:
        return self.rule("root")

    def rule(self, name: str) -> str:
        if name in self.open:
            raise _NotRegular
        if name not in self.done:
            self.open.add(name)
            self.done[name] = self.node(self.rules[name])
            self.open.remove(name)
        return self.done[name]

    def node(self, node: Node) -> str:
        text = self.expand(node)
        self.n_written += len(text)
        if len(text) > LONGEST_REGEX or self.n_written > MOST_EXPANDED:
            raise _NotRegular
        return text

    def expand(self, node: Node) -> str:
        if isinstance(node, Literal):
            return "".join(map(_escaped, node.text))
        if isinstance(node, CharClass):
            return _class_text(node)
        if isinstance(node, Ref):
            return f"(?:{self.rule(node.name)})"
        if isinstance(node, Group):
            return "".join(f"(?:{self.node(i)})" if isinstance(i, Choice) else self.node(i) for i in node.items)
        if isinstance(node, Choice):
            return "|".join(self.node(option) for option in node.options)
        if isinstance(node, Repeat):
            return f"(?:{self.node(node.item)}){_count_text(node)}"
        raise _NotRegular


class _RuleWriter:
    """Writes nodes as Lark rules with single-character terminals."""

    def __init__(self, names: Mapping[str, str], token_ids: Mapping[str, Sequence[int]]) -> None:
        self.names = names
        self.token_ids = token_ids

    def node(self, node: Node) -> str:
        if isinstance(node, Literal):
            return "(" + " ".join(f"/{_escaped(char)}/" for char in node.text) + ")" if node.text else '""'
        if isinstance(node, CharClass):
            return f"/{_class_text(node)}/"
        if isinstance(node, Ref):
            return self.names[node.name]
        if isinstance(node, TokenRef):
            return self.token(node)
        if isinstance(node, Group):
            return "(" + " ".join(self.node(item) for item in node.items) + ")" if node.items else '""'
        if isinstance(node, Choice):
            return "(" + " | ".join(self.node(option) for option in node.options) + ")"
        return f"({self.node(node.item)}){_count_text(node)}"

    def token(self, node: TokenRef) -> str:
        ids = [node.token] if isinstance(node.token, int) else self.token_ids.get(node.token)
        if not ids:
            raise GrammarError(f"error parsing grammar: the vocabulary has no token {node.token}")
        if node.negated and len(ids) > 1:
            raise GrammarError(f"error parsing grammar: !{node.token} is {len(ids)} tokens; one can be excluded")
        if node.negated:
            return f"<[^{ids[0]}]>"
        return "(" + " ".join(f"<[{token}]>" for token in ids) + ")"


def _escaped(char: str) -> str:
    return char if re.match(r"[A-Za-z0-9 _]", char) else f"\\x{{{ord(char):X}}}"


def _class_text(node: CharClass) -> str:
    parts = []
    for first, last in node.ranges:
        parts.append(f"\\x{{{first:X}}}" if first == last else f"\\x{{{first:X}}}-\\x{{{last:X}}}")
    if not parts:
        return _class_text(CharClass(((0, LAST_CHARACTER),))) if node.negated else "[^\\x{0}-\\x{10FFFF}]"
    return f"[{'^' if node.negated else ''}{''.join(parts)}]"


def _count_text(node: Repeat[Node]) -> str:
    if node.high is None:
        return "*" if node.low == 0 else "+" if node.low == 1 else f"{{{node.low},}}"
    return f"{{{node.low},{node.high}}}"
