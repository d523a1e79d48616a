"""Conversations to prompts by the template that fits them, and how the answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ikpy.engine.grammars.thinking import ThinkingLimit
from ikpy.errors import IkpyError
from ikpy.server.chat.code_calls import with_code
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.prefill import with_beginning
from ikpy.server.chat.recipients import MARK, NO_CALLS, has_recipients
from ikpy.server.chat.tags import answer_tags, ends_inside, is_harmony, reasoning_tags
from ikpy.server.chat.tool_fields import (
    own_variable,
    takes_field,
    with_all_fields,
    with_call_fields,
    with_field,
    with_plans,
    with_responses,
    with_thinking,
    with_written_calls,
)
from ikpy.server.chat.tool_formats import tool_format
from ikpy.server.chat.tool_ids import with_short_ids
from ikpy.server.chat.tool_prompt import shows_tools, with_tools
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.errors import bad_request
from ikpy.server.read_params import flag, integer, mapping
from ikpy.server.settings import REASONING_FORMATS

if TYPE_CHECKING:
    from ikpy.server.front import Front
    from ikpy.vocab import ChatTemplate

Body = Mapping[str, Any]


class Rendered(NamedTuple):
    """Prompt text, form of the answer, and the format of its tool calls if there may be any; ``inside``: whether the
    prompt ends inside reasoning, in whatever way that is shown; ``reasoning_format``: which way that is."""

    text: str
    output: OutputFormat
    format: ToolFormat | None
    inside: bool
    reasoning_format: str


def render(
    front: Front,
    template: ChatTemplate,
    body: Body,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    choice: str,
) -> Rendered:
    """A conversation as a prompt. Raises ApiError 400."""
    tools = [with_all_fields(tool) for tool in tools]
    variables = own_variable(template.source, tools) | template_variables(front, template, body)
    format_ = tool_format(template.source) if tools and choice != "none" else None
    if format_ is not None:
        format_ = format_.knowing([tool["function"] for tool in tools])
    messages = fitted(template.source, messages, tools, format_)
    prefill = front.settings.prefill_assistant and ends_open(messages)
    tags = reasoning_tags(template.source)
    try:
        text = template.render(
            messages[:-1] if prefill else messages,
            prefill or flag(body, "add_generation_prompt", True),
            tools or None,
            drop_bos=front.vocab.add_bos,
            **variables,
        )
        inside = tags is not None and ends_inside(text, tags)
        if prefill:
            text, inside = with_beginning(template.source, text, messages[-1], tags)
    except IkpyError as error:
        raise bad_request(str(error)) from None
    shown = reasoning_format(front, body)
    output = output_format(front, template, shown, inside, variables, format_)
    if has_recipients(template.source) and not front.settings.skip_chat_parsing:
        output = replace(output, tools=format_ or NO_CALLS, opened=text.endswith(MARK))
    return Rendered(text, output, format_, inside, shown)


def ends_open(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer; one with calls is complete."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def fitted(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], format_: ToolFormat | None
) -> list[dict[str, Any]]:
    """The messages as a template wants them that is not written for the form of OpenAI's API."""
    if "developer" not in source:
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    messages = [with_call_fields(message) for message in messages]
    messages = with_thinking(source, with_plans(source, with_short_ids(source, messages)))
    messages = with_responses(source, with_code(source, with_written_calls(source, messages)))
    if format_ is not None and takes_field(source):
        return with_field(messages, tools)
    if format_ is not None and format_.example and not shows_tools(source):
        return with_tools(messages, tools, format_)
    return messages


def template_variables(front: Front, template: ChatTemplate, body: Body) -> dict[str, Any]:
    """Variables of the template from the command line and the request."""
    settings = front.settings
    variables = dict(settings.chat_template_kwargs)
    if settings.reasoning != "auto" or "enable_thinking" in template.source:
        variables.setdefault("enable_thinking", settings.reasoning != "off")
    effort = body.get("reasoning_effort")
    if effort is None and settings.reasoning_effort != "default":
        effort = settings.reasoning_effort
    if isinstance(effort, str):
        variables["reasoning_effort"] = effort
    if effort == "none":
        variables["enable_thinking"] = False
    extra = mapping(body, "chat_template_kwargs")
    reserved = {"messages", "add_generation_prompt", "tools", "continue_final_message", "drop_bos", "self"}
    variables |= {name: value for name, value in extra.items() if name not in reserved}
    if isinstance(variables.get("enable_thinking"), str):  # "false" would be true in a template
        raise bad_request('invalid type for "enable_thinking" (expected boolean, got string)')
    if "enable_thinking" in variables:  # what DeepSeek V3.1 and Granite call it
        variables.setdefault("thinking", variables["enable_thinking"])
    return variables


def thinking_limit(front: Front, template: ChatTemplate, body: Body, *, inside: bool) -> ThinkingLimit | None:
    """The limit of a request's reasoning: its own or that of the command line. ``inside``: the prompt ends in it."""
    source, message = template.source, front.settings.reasoning_budget_message
    n_max, tags = integer(body, "thinking_budget_tokens", front.settings.reasoning_budget), reasoning_tags(source)
    if n_max < 0 or tags is None:
        return None
    end = front.vocab.tokenize(message + tags[1], add_special=False, parse_special=True)
    return ThinkingLimit(n_max, *tags, tuple(end), inside, is_harmony(source))


def reasoning_format(front: Front, body: Body) -> str:
    """Where the answer shows its reasoning: as the request says, or as the command line does."""
    wanted = body.get("reasoning_format")
    if wanted is None:
        return front.settings.reasoning_format
    if wanted not in REASONING_FORMATS:
        raise bad_request(f"Unknown reasoning format: {wanted}")
    return str(wanted)


def output_format(
    front: Front,
    template: ChatTemplate,
    wanted: str,
    inside: bool,
    variables: Mapping[str, Any],
    format_: ToolFormat | None,
) -> OutputFormat:
    """How the answer to a prompt is to be read that ends ``inside`` reasoning or not, which is shown as ``wanted``."""
    if front.settings.skip_chat_parsing:
        return OutputFormat()
    source = template.source
    tags = None if wanted == "none" else reasoning_tags(source)
    if is_harmony(source):
        return OutputFormat(tags, inside and tags is not None, format_, harmony=True)
    off = variables.get("enable_thinking") is False and template.switches_thinking
    if off and not inside:  # some templates open reasoning all the same
        tags = None
    return OutputFormat(tags, inside and tags is not None, format_, answer=answer_tags(source))
