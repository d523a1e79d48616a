"""GBNF rules of JSON values without constraints, and which other rules each of them uses."""

from __future__ import annotations

PRIMITIVES = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "char": r'[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\"" space',
    "boolean": '("true" | "false") space',
    "null": '"null" space',
    "integral": "[0] | [1-9] [0-9]{0,15}",
    "integer": '("-"? integral) space',
    "number": '("-"? integral) ("." [0-9]{1,16})? ([eE] [-+]? exponent)? space',
    "exponent": '[0-9]{1,2} | "1" [0-9]{2} | "2" [0-8] [0-9]',
    "value": "object | array | string | number | boolean | null",
    "object": r'"{" space (string ":" space value ("," space string ":" space value)*)? "}" space',
    "array": '"[" space (value ("," space value)*)? "]" space',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
    '("Z" | ("+" | "-") ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "date-time": 'date "T" time',
    "uuid": "[0-9a-fA-F]{8}" + ' "-" [0-9a-fA-F]{4}' * 3 + ' "-" [0-9a-fA-F]{12}',
}
USES = {
    "string": ("char", "space"),
    "boolean": ("space",),
    "null": ("space",),
    "integer": ("integral", "space"),
    "number": ("integral", "exponent", "space"),
    "value": ("object", "array", "string", "number", "boolean", "null"),
    "object": ("string", "value", "space"),
    "array": ("value", "space"),
    "date-time": ("date", "time"),
}
