"""Chat requests of the OpenAI form: checked, rendered to a prompt, with the way the answer is to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.lazy_grammar import Trigger
from ikpy.server.chat.answer_grammar import answer_grammar
from ikpy.server.chat.call_grammar import Mark, call_grammar, control_tokens, marker_rule
from ikpy.server.chat.earlier_answers import with_usual_fields
from ikpy.server.chat.harmony import BODY, MARKERS, START
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.rendering import render, thinking_limit
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.errors import bad_request
from ikpy.server.http import aside, to_json
from ikpy.server.media import FIELDS, NO_MEDIA, ChatMedia
from ikpy.server.params import GenerationParams, schema_grammar
from ikpy.server.prompts import Prompt
from ikpy.server.read_params import flag, integer, mapping
from ikpy.server.structured import with_structured

if TYPE_CHECKING:
    from starlette.requests import Request

    from ikpy.engine.sampling import SamplingParams
    from ikpy.server.front import Front

Body = Mapping[str, Any]
DEFAULT_TOP_LOGPROBS = 20
OTHER_MEDIA = {"input_video": "video", "video_url": "video"}
"""Types of content parts that no model here understands."""
LONGEST_NAME = 1000
"""Characters of the name of a model."""


@dataclass(frozen=True)
class ChatRequest:
    """A prompt with generation parameters and the form of the answer.

    ``n_top``: the most probable tokens that are shown beside each token, None for no log probabilities.
    """

    prompt: Prompt
    params: GenerationParams
    output: OutputFormat
    model: str
    n_top: int | None
    include_usage: bool


async def chat_request(request: Request, body: Body, front: Front, *, may_exceed: bool = False) -> ChatRequest:
    """Everything of a chat request, with the tokens of its media (`Front.seen`). Raises ApiError."""
    chat = await aside(request, read_chat, body, front)
    return replace(chat, prompt=await front.seen(chat.prompt, request, may_exceed=may_exceed))


def read_chat(body: Body, front: Front) -> ChatRequest:
    """Everything of a chat request; `Front.seen` completes a prompt with media. Raises ApiError 400."""
    media = front.chat_media()
    messages = read_messages(body, media)
    tools = read_tools(body)
    choice = read_tool_choice(body)
    body = with_structured(body)
    check_grammar(body, tools)
    body = constrained(body)
    template = front.template_for(tools)
    text, output, format_, inside, reasoning_format = render(front, template, body, messages, tools, choice)
    params = front.read_params(body)
    n_top = read_logprobs(body)
    if n_top is not None and tools and params.stream:
        raise bad_request("logprobs is not supported with tools + stream")
    if n_top is None and params.n_probs > 0 and not (tools and params.stream):
        n_top = params.n_probs
    if tools and format_ is not None:
        callable_tools = allowed_tools(body, tools)
        called = forced_tools(callable_tools, choice)
        several = flag(body, "parallel_tool_calls", front.settings.parallel_tool_calls or not called)
        mark = marker_rule(front.vocab)
        params = with_calls(params, output, format_, mark, callable_tools, forced=called, several=several)
    elif params.sampling.has_grammar:
        sampling = with_content(params.sampling, output, marker_rule(front.vocab))
        params = replace(params, sampling=sampling, trigger=behind_reasoning(output))
    prompt = chat_prompt(front, text, media)
    params = replace(
        params,
        n_probs=params.n_probs if n_top is None else max(n_top, 1),
        preserved_tokens=preserved_tokens(front, output),
        thinking=thinking_limit(front, template, body, inside=inside),
        chat_format="peg-native" if format_ is not None else "Content-only",
        reasoning_format=reasoning_format,
    )
    usage = mapping(body, "stream_options").get("include_usage") is True
    return ChatRequest(prompt, params, output, model_of(body, front), n_top, usage)


def chat_prompt(front: Front, text: str, media: ChatMedia) -> Prompt:
    """A rendered conversation as a prompt, without tokens if it has media. Raises ApiError 400."""
    if media.marks.items:
        return Prompt([], media.public(text), parts=tuple(media.marks.parts(text)))
    tokens = front.vocab.tokenize(text, add_special=True, parse_special=True)
    if not tokens:
        raise bad_request('"messages" give an empty prompt')
    return Prompt(tokens, text)


def with_calls(
    params: GenerationParams,
    output: OutputFormat,
    format_: ToolFormat,
    mark: Mark,
    tools: list[dict[str, Any]],
    *,
    forced: list[dict[str, Any]],
    several: bool,
) -> GenerationParams:
    """Parameters with a grammar for tool calls: of the whole answer if one of ``forced`` must be made or the content
    follows a schema, else of what is behind the marker of a call."""
    functions = forced or [tool["function"] for tool in tools]
    free = not forced and params.sampling.json_schema is None
    if free and not format_.holds_begun:
        return params
    calls = call_grammar(format_, functions, mark, several=several, lazy=free)
    if forced or free:
        sampling = replace(params.sampling, grammar=calls, json_schema=None, regex=None)
    else:
        sampling = with_content(params.sampling, output, mark, calls)
    if not free:
        return replace(params, sampling=sampling, trigger=behind_reasoning(output))
    marker = format_.trigger or format_.opening
    skipped = BODY if output.harmony else output.reasoning
    trigger = Trigger(marker, skipped, output.in_reasoning, again=output.harmony)
    return replace(params, sampling=sampling, trigger=trigger)


def with_content(
    sampling: SamplingParams, output: OutputFormat, mark: Mark, calls: str | None = None
) -> SamplingParams:
    """Sampling whose schema holds for the content of the answer. Raises ApiError 400 for one that cannot be used."""
    only_content = calls is None and output.reasoning is None and output.answer is None and not output.harmony
    if sampling.json_schema is None or only_content:
        return sampling
    try:
        content = schema_grammar(sampling.json_schema)
    except GrammarError as error:
        raise bad_request(str(error)) from None
    return replace(sampling, grammar=answer_grammar(content, output, mark, calls), json_schema=None)


def behind_reasoning(output: OutputFormat) -> Trigger | None:
    """Holds a grammar back until reasoning that the prompt has opened ends; None if the answer begins at once."""
    if output.reasoning is None or not output.in_reasoning:
        return None
    return Trigger(output.reasoning[1] + (START if output.harmony else ""))


def preserved_tokens(front: Front, output: OutputFormat) -> frozenset[int]:
    """Tokens whose text the reader of the answer looks for; as control tokens they would be invisible."""
    texts = [
        *(MARKERS if output.harmony else ()),
        *(output.reasoning or ()),
        *(output.answer or ()),
        *(output.tools.markers if output.tools else ()),
    ]
    return frozenset(token for text in texts for token in control_tokens(front.vocab, text))


def model_of(body: Body, front: Front) -> str:
    """Name of the model in the answer: the one asked for, or the loaded one's. Raises ApiError 400 for a long one,
    which every piece of a stream would repeat."""
    model = body.get("model")
    if isinstance(model, str) and len(model) > LONGEST_NAME:
        raise bad_request(f"model has {len(model)} characters: at most {LONGEST_NAME}")
    return model if isinstance(model, str) and model else front.model_name


# messages


def read_messages(body: Body, media: ChatMedia) -> list[dict[str, Any]]:
    """Checked messages, with marks in place of media."""
    if "messages" not in body:
        raise bad_request("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise bad_request("Expected 'messages' to be an array")
    messages = [with_usual_fields(message) for message in messages]
    for message in messages:
        check_message(message)
    messages = [with_marks(message, media) for message in messages]
    roles = [message["role"] for message in messages]
    if roles[-2:] == ["assistant", "assistant"]:
        raise bad_request("Cannot have 2 or more assistant messages at the end of the list.")
    return messages


def check_message(message: Any) -> None:
    """Raises ApiError 400 for a message that cannot be used."""
    if not isinstance(message, dict):
        raise bad_request("All non-assistant messages must contain 'content'")
    role = message.get("role")
    if role != "assistant" and "content" not in message:
        raise bad_request("All non-assistant messages must contain 'content'")
    if not isinstance(role, str):
        raise bad_request(f"Failed to parse messages: Missing 'role' in message: {to_json(message)}")
    content = message.get("content")
    if role == "assistant" and content is None and not message.get("tool_calls"):
        raise bad_request("Assistant message must contain either 'content' or 'tool_calls'!")
    if content is not None and not isinstance(content, (str, list)):
        raise bad_request("Expected 'content' to be a string or an array")
    for part in content if isinstance(content, list) else []:
        check_part(part)
    check_calls(message.get("tool_calls"))


def check_calls(calls: Any) -> None:
    """Raises ApiError 400 for tool calls of a message that cannot be shown to the template."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad_request("Expected 'tool_calls' to be an array")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"Missing tool call function: {to_json(call)}")
        if not isinstance(function.get("arguments", ""), (str, dict)):
            raise bad_request(f"Tool call arguments must be JSON text or an object: {to_json(call)}")


def check_part(part: Any) -> None:
    """Raises ApiError 400 for a content part that is neither text nor a picture nor a sound."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_request("unsupported content[].type")
    if kind in OTHER_MEDIA:
        raise bad_request(NO_MEDIA.format(OTHER_MEDIA[kind]))
    if kind not in FIELDS and (kind != "text" or not isinstance(part.get("text"), str)):
        raise bad_request("unsupported content[].type")


def with_marks(message: dict[str, Any], media: ChatMedia) -> dict[str, Any]:
    """A message whose content is one text if it has media. Raises ApiError 400 for those that cannot be used."""
    content = message.get("content")
    marked = media.content(content) if isinstance(content, list) else None
    return message if marked is None else message | {"content": marked}


# tools and constraints


def read_tools(body: Body) -> list[dict[str, Any]]:
    """Tools in the OpenAI form."""
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        shown = json.dumps(tools)
        raise bad_request(f"Failed to parse tools: Expected 'tools' to be an array, got {shown}; tools = {shown}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"Failed to parse tools: Missing function name in tool: {json.dumps(tool)}")
    return tools


def read_tool_choice(body: Body) -> str:
    """auto, none, required, or the name of a function behind a colon."""
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = allowed(choice).get("mode", "auto")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad_request(f"Invalid tool_choice: {json.dumps(choice)}")
        return f":{name}"
    if choice is None:
        return "auto"
    if choice not in ("auto", "none", "required"):
        raise bad_request(f"Invalid tool_choice: {choice}")
    return str(choice)


def allowed(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a ``tool_choice`` of type allowed_tools says. Raises ApiError 400."""
    inner = choice.get("allowed_tools")
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        raise bad_request(f"Invalid tool_choice: {json.dumps(choice)}")
    return inner


def allowed_tools(body: Body, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that may be called; the prompt shows all of them. Raises ApiError 400 for a name without a tool."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools
    found = []
    for wanted in allowed(choice)["tools"]:
        function = wanted.get("function") if isinstance(wanted, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise bad_request(f"Invalid tool_choice: there is no tool named {name}")
        found += named
    if not found:
        raise bad_request("Invalid tool_choice: allowed_tools names no tools")
    return found


def forced_tools(tools: list[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
    """Functions of which one must be called; empty when the model may choose."""
    functions = [tool["function"] for tool in tools]
    if choice == "required":
        return functions
    if choice.startswith(":"):
        named = [function for function in functions if function["name"] == choice[1:]]
        if not named and functions:
            raise bad_request(f"Invalid tool_choice: there is no tool named {choice[1:]}")
        return named
    return []


def check_grammar(body: Body, tools: list[dict[str, Any]]) -> None:
    """Raises ApiError 400 for a grammar beside a schema or tools."""
    if body.get("json_schema") is not None and body.get("grammar"):
        raise bad_request("Cannot use both json_schema and grammar")
    if tools and body.get("grammar"):
        raise bad_request("Cannot use custom grammar constraints with tools.")


def constrained(body: Body) -> dict[str, Any]:
    """The body with ``response_format`` turned into ``json_schema``.

    Clients of Hugging Face's text-generation-inference name the schema of a json_object, or json, ``value``.
    """
    out = dict(body)
    wanted = mapping(body, "response_format")
    kind = wanted.get("type")
    if kind in ("json_object", "json"):
        given = (wanted[name] for name in ("schema", "value") if wanted.get(name) is not None)
        out["json_schema"] = next(given, {"type": "object"})
    elif kind == "json_schema":
        out["json_schema"] = named_schema(wanted) or {"type": "object"}
    elif kind not in (None, "text"):
        raise bad_request(f'response_format type must be one of "text" or "json_object", but got: {kind}')
    return out


def named_schema(wanted: Mapping[str, Any]) -> Any:
    """The schema of a ``response_format`` in one of the ways clients write it; None without one."""
    inner = wanted.get("json_schema")
    places = [inner.get("schema"), inner.get("json_schema")] if isinstance(inner, dict) else []
    return next((schema for schema in [*places, wanted.get("schema")] if schema), None)


def read_logprobs(body: Body) -> int | None:
    """How many of the most probable tokens are shown; None if no log probabilities are wanted."""
    wanted = body.get("logprobs")
    if isinstance(wanted, int) and not isinstance(wanted, bool):  # the number, as at /v1/completions
        return wanted if wanted > 0 else None
    if flag(body, "logprobs"):
        return max(0, integer(body, "top_logprobs", DEFAULT_TOP_LOGPROBS))
    if isinstance(body.get("top_logprobs"), int) and body["top_logprobs"]:
        raise bad_request("top_logprobs requires logprobs to be set to true")
    return None
