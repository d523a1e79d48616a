"""Large JSON read and written in turns with other threads: json's own C code keeps them all waiting until it ends."""

from __future__ import annotations

import json
import json.decoder
import json.scanner
from collections.abc import Callable
from typing import Any

MOST_CONTAINERS = 1_000_000
"""Arrays and objects of a JSON text; the garbage collector, which holds up everything, looks at each of them."""
DEPTH = 6
"""Levels whose items are encoded one by one: down to the tokens in the log probabilities of an answer."""
BLOCK = 10_000
"""Items of a list of numbers or texts that are encoded at once, and characters of one that are decoded at once."""


class TooManyError(ValueError):
    """A JSON text with more arrays and objects than are accepted."""


class PatientDecoder(json.JSONDecoder):
    """Decodes in Python, which takes about 1 us per value, and long lists of numbers in blocks. Raises TooManyError."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._n_containers = 0
        self.parse_array = self._counted(self._array)
        self.parse_object = self._counted(json.decoder.JSONObject)  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._n_containers += 1
            if self._n_containers > MOST_CONTAINERS:
                raise TooManyError(f"more than {MOST_CONTAINERS} arrays and objects")
            return parse(*args)

        return counted

    def _array(self, text_and_start: tuple[str, int], *more: Any) -> tuple[list[Any], int]:
        text, at = text_and_start
        end = text.find("]", at)
        if end - at <= BLOCK or any(text.find(mark, at, end) >= 0 for mark in '"[{'):
            return json.decoder.JSONArray(text_and_start, *more)  # type: ignore[attr-defined]
        found: list[Any] = []
        while at <= end:
            cut = text.find(",", min(at + BLOCK, end), end)
            cut = end if cut < 0 else cut
            block = json.loads(f"[{text[at:cut]}]", parse_constant=self.parse_constant, parse_float=self.parse_float)
            if not block:
                raise ValueError("a list ends with a comma")
            found += block
            at = cut + 1
        return found, end + 1


def encode(value: Any, encoder: json.JSONEncoder) -> str:
    """What ``encoder.encode`` gives for compact JSON."""
    out: list[str] = []
    _encode(value, encoder.encode, out, DEPTH)
    return "".join(out)


def _encode(value: Any, whole: Callable[[Any], str], out: list[str], depth: int) -> None:
    if not depth or not value or not isinstance(value, (dict, list)):
        out.append(whole(value))
    elif isinstance(value, dict):
        before = "{"
        for key, item in value.items():
            out.append(f"{before}{whole(key)}:")
            _encode(item, whole, out, depth - 1)
            before = ","
        out.append("}")
    elif isinstance(value[0], (dict, list)):
        before = "["
        for item in value:
            out.append(before)
            _encode(item, whole, out, depth - 1)
            before = ","
        out.append("]")
    else:
        blocks = (whole(value[at : at + BLOCK])[1:-1] for at in range(0, len(value), BLOCK))
        out.append(f"[{','.join(blocks)}]")
