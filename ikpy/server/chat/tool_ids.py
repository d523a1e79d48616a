"""Ids of tool calls: those that clients leave out, and short ones for templates of Mistral, which refuse all others."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LENGTH = 9
CHECKS = ("length != 9", "length < 9")
"""What is in these templates; those with the second take the last nine characters."""


def with_short_ids(source: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids that a template takes; equal ids stay equal, so calls and results still belong together."""
    if not any(check in source for check in CHECKS):
        return [dict(message) for message in messages]
    return [_shortened(message) for message in with_ids(messages)]


def with_ids(messages: Sequence[Any]) -> list[Any]:
    """The messages with an id for every call and, in the order of the calls, for their results, where there is none.

    What is no message is left as it is.
    """
    found, waiting, n_calls = [], deque[Any](), 0
    for message in messages:
        out = dict(message) if isinstance(message, Mapping) else message
        found.append(out)
        if not isinstance(out, dict):
            continue
        if isinstance(out.get("tool_calls"), list):
            out["tool_calls"] = [dict(call) if isinstance(call, Mapping) else call for call in out["tool_calls"]]
            for call in out["tool_calls"]:
                n_calls += 1
                if isinstance(call, dict):
                    waiting.append(_set_missing(call, "id", f"call_{n_calls}"))
        if out.get("role") == "tool" and waiting:
            _set_missing(out, "tool_call_id", waiting.popleft())
    return found


def _set_missing(out: dict[str, Any], name: str, value: Any) -> Any:
    """The value of a field, which is set if there is none."""
    if out.get(name) is None:
        out[name] = value
    return out[name]


def _shortened(message: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(message)
    if isinstance(out.get("tool_call_id"), str):
        out["tool_call_id"] = short_id(out["tool_call_id"])
    if isinstance(out.get("tool_calls"), list):
        calls = out["tool_calls"]
        out["tool_calls"] = [c | {"id": short_id(c["id"])} if isinstance(c.get("id"), str) else c for c in calls]
    return out


def short_id(text: str) -> str:
    """An id of the right length as it is, the beginning of a hash of any other."""
    if len(text) == LENGTH and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:LENGTH]
