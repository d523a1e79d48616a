"""Requests of the Ollama API in the forms of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ikpy.server.chat.tool_ids import with_ids
from ikpy.server.errors import bad_request
from ikpy.server.read_params import flag, integer, wrong_type

OPTIONS = {
    "num_predict": "n_predict", "num_keep": "n_keep", "tfs_z": "tfs_z", "typical_p": "typical_p", "stop": "stop",
    "penalize_newline": "penalize_nl",
    **{name: name for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "repeat_last_n", "repeat_penalty", "presence_penalty",
        "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta",
    )},
}  # fmt: skip
"""Names of sampling options here; those about loading (num_ctx, num_gpu, ...) have no effect."""
MOST_TOP = 20
"""Ollama's limit of ``top_logprobs``."""


def common_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Options, form of the answer and thinking as fields of a chat request."""
    options = body.get("options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise bad_request("'options' must be an object")
    out: dict[str, Any] = {OPTIONS[name]: value for name, value in options.items() if name in OPTIONS}
    out["stream"] = flag(body, "stream", True)
    form = body.get("format")
    if form == "json":
        out["json_schema"] = {"type": "object"}
    elif isinstance(form, dict):
        out["json_schema"] = form
    elif form:
        raise bad_request("'format' must be \"json\" or a JSON schema")
    n_top = read_logprobs(body)
    if n_top is not None:
        out |= {"logprobs": True, "top_logprobs": n_top, "n_probs": max(n_top, 1)}
    think = body.get("think")
    if isinstance(think, bool):
        out["chat_template_kwargs"] = {"enable_thinking": think}
    elif isinstance(think, str):
        out["reasoning_effort"] = think
    elif think is not None:
        raise wrong_type("think", "boolean or string", think)
    return out


def read_logprobs(body: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens are shown beside each; None if no log probabilities are wanted."""
    n_top = integer(body, "top_logprobs", 0)
    if not 0 <= n_top <= MOST_TOP:
        raise bad_request(f"top_logprobs must be between 0 and {MOST_TOP}")
    return n_top if flag(body, "logprobs") else None


def chat_messages(value: Any) -> Any:
    """Messages in the OpenAI form; what is no message is left for the checks of chat requests."""
    if not isinstance(value, list):
        return value
    return with_ids([chat_message(item) if isinstance(item, dict) else item for item in value])


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message in the OpenAI form."""
    out = {"role": message.get("role"), "content": with_images(message.get("content", ""), read_images(message))}
    if isinstance(message.get("thinking"), str):
        out["reasoning_content"] = message["thinking"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    for name, field in (("tool_name", "name"), ("tool_call_id", "tool_call_id")):
        if isinstance(message.get(name), str):
            out[field] = message[name]
    return out


def read_images(body: Mapping[str, Any]) -> list[str]:
    """Field ``images``: base64 of files. Raises ApiError 400."""
    images = body.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise bad_request("'images' must be an array of base64 strings")
    return images


def with_images(content: Any, images: Sequence[str]) -> Any:
    """Content in the OpenAI form with pictures in front of the text."""
    if not images:
        return content
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": content}] if isinstance(content, str) and content else parts
