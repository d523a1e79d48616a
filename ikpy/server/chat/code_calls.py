"""Calls of Functionary 3.1's interpreter: behind ``<|python_tag|>`` stands code, to the end of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ikpy.server.chat.tagged_values import parameters_of, value_types
from ikpy.server.chat.tool_reading import CallPart, CallReader, value_or_text

CODE_TAG = "<|python_tag|>"
INTERPRETERS = ("python", "ipython")


class CodeCall(CallReader):
    """A call of the tool ``name`` with the code in its parameter ``key``, given out as it comes."""

    def __init__(self, name: str, key: str) -> None:
        self._name: str | None = name
        self._key = key

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes."""
        out = json.dumps(text, ensure_ascii=False)[1:-1] + ('"}' if final and not self.cut else "")
        if self._name is not None:
            out = f'{{{json.dumps(self._key, ensure_ascii=False)}: "{out}'
        if out:
            yield CallPart(out, self._name)
            self._name = None
        if final:
            self.rest = ""


def code_readers(functions: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[], CallReader]]:
    """A reader of code if one of the functions is an interpreter: it has one parameter that is a text."""
    for function in functions:
        properties = parameters_of(function.get("parameters")).properties
        texts = [key for key, schema in properties.items() if "string" in value_types(schema)]
        if function["name"] in INTERPRETERS and (len(texts) == 1 or not properties):
            return {CODE_TAG: partial(CodeCall, function["name"], texts[0] if texts else "code")}
    return {}


def with_code(source: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the code of such calls as their arguments, for templates that write these behind the tag."""
    if CODE_TAG not in source or "<function=" not in source:
        return list(messages)
    return [
        m | {"tool_calls": [_with_code(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _with_code(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    values = value_or_text(arguments) if isinstance(arguments, str) else arguments
    code = list(values.values()) if isinstance(values, dict) else []
    if function["name"] not in INTERPRETERS or len(code) != 1 or not isinstance(code[0], str):
        return call
    return call | {"function": function | {"arguments": code[0]}}
