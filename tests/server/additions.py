"""Answers of ikpy without what they have more than recorded ones; tests of their own look at that."""

from __future__ import annotations

import copy
import re
from typing import Any

SETTINGS = {
    "top_n_sigma", "xtc_probability", "xtc_threshold", "post_sampling_probs", "timings_per_token", "grammar_lazy",
    "lora",
}  # fmt: skip
PROBABILITY = {"id", "token", "bytes", "logprob", "top_logprobs", "prob", "top_probs"}
SLOT = {
    "params", "is_processing", "speculative", "n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache",
}  # fmt: skip
ADDED: dict[str, set[str]] = {
    "": {
        "index", "tokens", "tokens_predicted", "tokens_evaluated", "has_new_line", "stop_type", "system_fingerprint",
        "model_ftype", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "build_info", "is_sleeping",
        "truncated",
        *SLOT, *SETTINGS,
    },
    "slots": SLOT | SETTINGS,
    "timings": {"cache_n"},
    "generation_settings": SETTINGS,
    "default_generation_settings": SETTINGS | {"params"},
    "completion_probabilities": PROBABILITY,
    "data": {"aliases", "tags", "architecture"},
    "meta": {"n_ctx", "ftype"},
    "models": {
        "name", "model", "modified_at", "size", "digest", "type", "tags", "capabilities", "parameters", "details",
    },
    "chat_template_caps": {
        "supports_object_arguments", "supports_string_content", "supports_system_role", "supports_tool_calls",
        "supports_tools", "supports_typed_content", "supports_parallel_tool_calls", "supports_preserve_reasoning",
        "supports_reasoning_effort",
    },
    "modalities": {"video"},
}  # fmt: skip
"""Fields of llama.cpp's server that the recorded program does not have, by the field whose value has them."""
RESPONSES = ("/v1/responses", "/responses")
ENDINGS = ("response.output_text.done", "response.content_part.done", "response.output_item.done", "content_block_stop")


def without_additions(path: str, want: Any, got: Any) -> Any:
    """``got`` (response or events) in the form of ``want``: responses have more fields and events here, and items and
    blocks end before the next one begins instead of all at the end; errors of long prompts say how long they are."""
    got = without_added(want, got)
    if path in RESPONSES or (path == "/v1/messages" and isinstance(want, list)):
        return like(want, recorded_order(want, got) if isinstance(want, list) and isinstance(got, list) else got)
    return recorded_error(got)


def without_added(want: Any, got: Any, place: str = "") -> Any:
    """``got``, the value of the field ``place``, without the fields of ``ADDED`` that were not recorded."""
    if isinstance(want, dict) and isinstance(got, dict):
        added = ADDED.get("" if place == "data" and ("content" in got or "choices" in got) else place, set())
        return {
            name: without_added(want.get(name), value, name)
            for name, value in got.items()
            if name in want or name not in added
        }
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return [without_added(a, b, place) for a, b in zip(want, got, strict=True)]
    return got


def recorded_error(got: Any) -> Any:
    """An answer with an error in its recorded form: without Anthropic's name of it, and of a prompt that is too long
    without what says so in numbers, with its recorded type."""
    error = got.get("error") if isinstance(got, dict) else None
    if not isinstance(error, dict):
        return got
    got = {name: value for name, value in got.items() if (name, value) != ("type", "error")}
    if "n_prompt_tokens" not in error:
        return got
    message = re.sub(r"^prompt is too long: \d+ tokens > \d+ maximum: ", "", error["message"])
    return got | {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}


def like(want: Any, got: Any) -> Any:
    """The fields of ``got`` that ``want`` has, in its order."""
    if isinstance(want, dict) and isinstance(got, dict):
        return {name: like(value, got[name]) for name, value in want.items() if name in got}
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return [like(a, b) for a, b in zip(want, got, strict=True)]
    return got


def recorded_order(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events whose names were recorded, those that end items in front of the last ones."""
    names = {event.get("event") for event in want}
    known = [copy.deepcopy(event) for event in got if event.get("event") in names and not of_reasoning(event)]
    first_end = next((i for i, event in enumerate(want) if ends_item(event)), len(want))
    behind = sum(not ends_item(event) for event in want[first_end:])
    others = [event for event in known if not ends_item(event)]
    at = len(others) - behind
    events = [*others[:at], *(event for event in known if ends_item(event)), *others[at:]]
    for number, event in enumerate(events):
        if "sequence_number" in event.get("data", ()):
            event["data"]["sequence_number"] = number
    return events


def ends_item(event: dict[str, Any]) -> bool:
    """Whether an event ends an item or a block."""
    data = event.get("data")
    delta = data.get("delta") if isinstance(data, dict) else None
    return event.get("event") in ENDINGS or (isinstance(delta, dict) and delta.get("type") == "signature_delta")


def of_reasoning(event: dict[str, Any]) -> bool:
    """Whether an event is of a content part of reasoning, which was not recorded."""
    part = event["data"].get("part") if isinstance(event.get("data"), dict) else None
    return isinstance(part, dict) and part["type"] == "reasoning_text"
