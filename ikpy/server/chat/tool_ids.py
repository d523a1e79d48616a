"""Ids of tool calls for templates of Mistral, which refuse all but nine letters and digits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

LENGTH = 9
CHECKS = ("length != 9", "length < 9")
"""What is in these templates; those with the second take the last nine characters."""


def with_short_ids(source: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids that a template takes; equal ids stay equal, so calls and results still belong together."""
    if not any(check in source for check in CHECKS):
        return [dict(message) for message in messages]
    return [_shortened(message) for message in messages]


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
