"""Messages as OpenAI's clients send them back, with fields that no template reads."""

from __future__ import annotations

from typing import Any


def with_usual_fields(message: Any) -> Any:
    """A message whose refusals are text, and whose call or result of the older API (``function_call``, the role
    ``function``) is one of tools. Anything else stays as it is, for the checks."""
    if not isinstance(message, dict):
        return message
    out = dict(message)
    content, role, call = message.get("content"), message.get("role"), message.get("function_call")
    if isinstance(content, list):
        out["content"] = [_text_of_refusal(part) for part in content]
    elif role == "assistant" and content is None and isinstance(message.get("refusal"), str):
        out["content"] = message["refusal"]
    if role == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
        out["tool_calls"] = [{"id": _call_id(call), "type": "function", "function": call}]
    if role == "function":
        out |= {"role": "tool", "tool_call_id": _call_id(message)}
    return out


def _text_of_refusal(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part:
        return {"type": "text", "text": part["refusal"]}
    return part


def _call_id(named: dict[str, Any]) -> str:
    """An identifier that a call and its result have in common: the older API knows the name only."""
    return f"call_{named.get('name', '')}"
