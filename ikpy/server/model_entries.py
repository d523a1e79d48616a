"""Models in the forms that clients of several APIs list them in."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ikpy.errors import FileFormatError
from ikpy.gguf.metadata import scalar_or
from ikpy.quants.registry import ftype_by_id

FOREVER = "2500-01-01T00:00:00Z"
"""When a model is unloaded that stays loaded."""
TOOL_OUTPUT = 10_000
"""Tokens of a tool's output that Codex keeps of a model whose context is not known."""


def stamp(seconds: float | None = None) -> str:
    """Time (UTC; None = now) as Ollama's and Anthropic's API write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def digest(*facts: object) -> str:
    """64 digits for a model, others when its facts change; Ollama's programs show the first twelve."""
    return hashlib.sha256("\n".join(map(str, facts)).encode("utf-8", "surrogateescape")).hexdigest()


def file_type(metadata: Mapping[str, Any]) -> str:
    """Name of the file type (`Q4_K_M`), "unknown" if the file says none."""
    try:
        return ftype_by_id(scalar_or(metadata, "general.file_type", -1)).name
    except FileFormatError:
        return "unknown"


def model_list(entries: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> dict[str, Any]:
    """Answer of GET /v1/models: OpenAI's list with what llama.cpp's page and Codex read; if a client of
    Anthropic's asks, what that reads too."""
    found: dict[str, Any] = {"object": "list", "data": [shown_entry(entry, headers) for entry in entries]}
    if "anthropic-version" in headers:
        ids = [entry["id"] for entry in entries] or [None]
        found |= {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return found | {"models": [llama_entry(entry) | codex_entry(entry) for entry in entries]}


def shown_entry(entry: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """One model in OpenAI's form, with Anthropic's fields for its clients."""
    if "anthropic-version" not in headers:
        return dict(entry)
    return {**entry, "type": "model", "display_name": entry["id"], "created_at": stamp(entry["created"])}


def llama_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A model in the list of llama.cpp's server, which leaves most fields of Ollama's API empty."""
    takes_media = len(modalities_of(entry)) > 1
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": ""}
    return {
        "name": entry["id"],
        "model": entry["id"],
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "tags": [""],
        "capabilities": ["completion", *(["multimodal"] if takes_media else [])],
        "parameters": "",
        "details": details | {"quantization_level": ""},
    }


def modalities_of(entry: Mapping[str, Any]) -> list[str]:
    """What a model understands, as far as it is known."""
    found: list[str] = entry.get("architecture", {}).get("input_modalities", ["text"])
    return found


def codex_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A model in the list that Codex asks for; what fits a request, and what it may hold, is known if it is loaded."""
    name, n_ctx = entry["id"], entry.get("max_model_len")
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "additional_speed_tiers": [],
        "service_tiers": [],
        "default_service_tier": None,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": "",
        "model_messages": None,
        "supports_reasoning_summaries": False,
        "default_reasoning_summary": "auto",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": n_ctx or TOOL_OUTPUT},
        "supports_parallel_tool_calls": False,
        "supports_image_detail_original": False,
        "context_window": n_ctx,
        "max_context_window": n_ctx,
        "auto_compact_token_limit": n_ctx and n_ctx * 9 // 10,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": modalities_of(entry),
        "supports_search_tool": False,
        "use_responses_lite": False,
        "auto_review_model_override": None,
        "tool_mode": None,
        "multi_agent_version": None,
    }
