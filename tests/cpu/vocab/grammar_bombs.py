"""Short texts that ask for unbounded work: grammars, schemas and expressions, compiled in a process of their own.

python -m tests.cpu.vocab.grammar_bombs prints a line of JSON for each: its name, the error or null, and the resident
memory that was added so far (KiB).
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import numpy as np

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar, json_schema_grammar, lark_grammar, regex_grammar

COMPILERS = {"grammar": gbnf_grammar, "json_schema": json_schema_grammar, "regex": regex_grammar, "lark": lark_grammar}
STEPS = 12


def chain(n: int, body: dict[str, Any]) -> str:
    """A schema of n definitions, each ``body`` with the reference NEXT to the one behind it."""
    text = json.dumps(body)
    definitions = {f"a{i}": json.loads(text.replace("NEXT", f"#/$defs/a{i + 1}")) for i in range(n)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": definitions | {f"a{n}": {"type": "object"}}})


def nested(n: int, left: str, middle: str, right: str) -> str:
    return left * n + middle + right * n


def rows(n: int) -> str:
    """A recursive grammar in which n rules can go on at every place."""
    rules = "\n".join(f'r{i} ::= [a-z]* "{i}"' for i in range(n))
    return f"root ::= ({' | '.join(f'r{i}' for i in range(n))}) root?\n{rules}"


def chained(n: int, body: str) -> str:
    """A recursive grammar of n rules, each ``body`` with the name NEXT of the one behind it."""
    rules = "".join(f"r{i} ::= {body.replace('NEXT', f'r{i + 1}')}\n" for i in range(n))
    return f'root ::= r0\n{rules}r{n} ::= "a" root?'


NEXT: dict[str, Any] = {"$ref": "NEXT"}
OBJECT = {"type": "object"}
TWICE: dict[str, Any] = {"allOf": [NEXT, NEXT]}
BOMBS: dict[str, tuple[str, str, str | None]] = {
    # field, text, message (None: it can be used)
    "repetitions": ("grammar", "root ::= " + nested(6, "(", '"a"', "){2000}"), None),
    "recursive repetitions": ("grammar", 'root ::= ((("a" root?){2000}){2000}){2000}', None),
    "doubling rules": (
        "grammar", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}? r{i + 1}?\n" for i in range(60)) + 'r60 ::= "a"',
        None,
    ),
    "ambiguity": ("grammar", 'root ::= s\ns ::= "a" s s s | "a" s s | "a" s | "a"', None),
    "long text": ("grammar", "#" * 2_000_000, "at most 1048576"),
    "deep groups": ("grammar", "root ::= " + nested(20_000, "(", '"a"', ")"), "nested too deeply"),
    "long literal": ("grammar", f'root ::= "{"x" * 1_000_000}"', "too big"),
    "a long rule in many": (
        "grammar",
        f"root ::= {' | '.join(f'r{i}' for i in range(9000))}\n" + "".join(f"r{i} ::= b\n" for i in range(9000))
        + f'b ::= "{"-" * 5000}"',
        None,
    ),
    "many rules at once": ("grammar", rows(4000), "Too many items"),
    "many symbols": ("grammar", rows(19_000), "too large"),
    "a chain of rules": ("grammar", chained(2000, '[a-z ]* "abc" NEXT?'), "nested too deeply"),
    "a short chain of rules": ("grammar", chained(700, "NEXT"), None),
    "a chain of groups": ("grammar", chained(400, f"{'(' * 10}NEXT{' [a-z])+' * 10}"), "nested too deeply"),
    "a chain of Lark rules": (
        "lark", "start: r0\n" + "".join(f"r{i}: r{i + 1} |\n" for i in range(5000)) + 'r5000: "a"', "nested too deeply",
    ),
    "a chain of references in Lark": ("lark", f"start: %json {chain(1500, {'items': NEXT})}", "nested too deeply"),
    "a slow lexer": (
        "grammar",
        f"root ::= {' | '.join(f'r{i}' for i in range(8000))}\n"
        + "".join(f'r{i} ::= [a-z ]* "abc" root?\n' for i in range(8000)),
        "Too many items",
    ),
    "a long name": ("grammar", f"root ::= {'x' * 500_000}", "undefined rule"),
    "doubled allOf": ("json_schema", chain(60, TWICE), "more than 50000 schemas"),
    "doubled anyOf in allOf": (
        "json_schema", chain(60, {"allOf": [{"anyOf": [NEXT, NEXT]}, OBJECT]}), "more than 50000 schemas",
    ),
    "doubled properties": (
        "json_schema", chain(60, {"properties": {name: {"allOf": [NEXT, OBJECT]} for name in "xy"}}),
        "more than 50000 schemas",
    ),
    "doubled references": ("json_schema", chain(60, {"allOf": [{"anyOf": [NEXT, NEXT]}]}), None),
    "combinations": (
        "json_schema", json.dumps({"allOf": [{"anyOf": [{"minLength": n} for n in range(9)]}] * 9}), "more than 50000",
    ),
    "further names": (
        "json_schema",
        json.dumps({"properties": {f"{n}{'x' * 20}": {} for n in range(900)}, "additionalProperties": {}}), None,
    ),
    "common values": (
        "json_schema", json.dumps({"allOf": [{"enum": list(range(n, n + 60_000))} for n in (0, 59_990)]}), None,
    ),
    "required names": ("json_schema", json.dumps({"required": [f"k{i}" for i in range(60_000)]}), "more than 50000"),
    "a long key": (
        "json_schema",
        json.dumps({"properties": {"k" * 400_000: {"properties": {f"a{i}": {} for i in range(20_000)}}}}),
        "at most 1048576",
    ),
    "deep schema": ("json_schema", nested(100_000, '{"items":', "{}", "}"), "nested too deeply"),
    "deep items": ("json_schema", nested(900, '{"items":', "{}", "}"), "nested too deeply"),
    "deep pattern": (
        "json_schema", json.dumps({"type": "string", "pattern": f"^{nested(200, '(', 'a{2000}', '){2000}')}$"}),
        "invalid regex",
    ),
    "arrays of arrays": ("json_schema", nested(10, '{"minItems":2000,"maxItems":2000,"items":', "{}", "}"), None),
    "nested counts": ("regex", nested(4, "(", "a", "{1000})") + "{1000}", None),
    "alternatives": ("regex", "(a|aa|aaa|b*)*c", None),
    "many states": ("regex", "([ab]*a[ab]{300}c){30}", None),
    "deep expression": ("regex", nested(20_000, "(", "a", ")"), "invalid regex"),
    "counted rules": ("lark", 'start: (x{1,100000}){1,100000}\nx: "a" | "b" x', None),
    "intersections": ("lark", "start: T\nT: /(.*a.{30})/ & ~/(.*b.{30})/ & /(.*c.{30})/", "fuel exhausted"),
    "doubling terminals": (
        "lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"', "too big",
    ),
    "deep rules": ("lark", f'start: {nested(20_000, "(", chr(34) + "a" + chr(34), ")")}', "nested"),
    "left recursion": ("lark", 'start: start start start | "a" |', None),
    "substrings": ("lark", 'start: %regex {"substring_chars": "' + "abcdefghij" * 30_000 + '"}', "too big"),
}  # fmt: skip


def follow(field: str, text: str, texts: TokenTexts) -> None:
    """Compiles a text and goes some tokens along it. Raises GrammarError."""
    grammar = COMPILERS[field](text, texts)
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        allowed = np.flatnonzero(grammar.mask())
        if not len(allowed):
            return
        grammar.accept(int(random.choice(allowed)))


def main() -> None:
    letters = [bytes([i]) for i in range(256)]
    texts = TokenTexts([*letters, *(a + b for a in letters[97:123] for b in letters[97:123])], special=(), eog=(0,))
    follow("regex", "a", texts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in sys.argv[1:] or BOMBS:
        field, text, _ = BOMBS[name]
        error = None
        try:
            follow(field, text, texts)
        except GrammarError as found:
            error = str(found)
        added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([name, error, added]), flush=True)


if __name__ == "__main__":
    main()
