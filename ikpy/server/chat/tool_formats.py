"""The known formats of tool calls, found in templates."""

from __future__ import annotations

from ikpy.server.chat.call_grammar import json_call, mistral_call
from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.tagged_values import CODER, GLM, SEED
from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN, KIMI, LLAMA
from ikpy.server.chat.tool_reading import ListedCalls, NamedCall, TaggedCall, ToolFormat

HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    lambda: TaggedCall("<tool_call>", "</tool_call>"),
    r'"\n"? call "\n"? @{</tool_call>}',
    json_call('{"name": '),
    r'"\n"?',
    ("<tool_call>", "</tool_call>"),
)
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    lambda: ListedCalls("[TOOL_CALLS]"),
    r'" "? "[" calls "]"',
    json_call('{"name": '),
    markers=("[TOOL_CALLS]",),
)

MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    "[TOOL_CALLS]",
    lambda: NamedCall("[TOOL_CALLS]"),
    "call",
    mistral_call,
    '" "?',
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)


def tool_format(template: str) -> ToolFormat | None:
    """How a template lets the model write calls; None when it knows no tools or an unsupported way.

    Templates of DeepSeek write the calls of a conversation but never show the tools: see `tool_prompt`.
    """
    if DEEPSEEK.opening in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_PLAIN
    if "tools" not in template:
        return None
    if "<arg_key>" in template and GLM.opening in template:
        return GLM
    if "<function=" in template and "<parameter=" in template:
        for tagged in (CODER, SEED):
            if tagged.opening in template:
                return tagged
    if HARMONY.opening in template and "<|message|>" in template:
        return HARMONY
    if MISTRAL_ARGS.opening in template and "[ARGS]" in template:
        return MISTRAL_ARGS
    for known in (KIMI, HERMES, MISTRAL):
        if known.opening in template:
            return known
    return LLAMA if "<|python_tag|>" in template or '{"name": function name' in template else None
