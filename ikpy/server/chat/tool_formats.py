"""The known formats of tool calls, found in templates."""

from __future__ import annotations

from ikpy.server.chat.call_grammar import function_call, json_call, mistral_call, mistral_list_call
from ikpy.server.chat.code_calls import code_readers
from ikpy.server.chat.gemma_calls import GEMMA, QUOTE
from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, DEEPSEEK_V4, DSML, GCML, GIGACHAT_GCML, MINIMAX
from ikpy.server.chat.listed_calls import ListedCalls
from ikpy.server.chat.python_calls import LFM2, is_lfm2
from ikpy.server.chat.recipients import RECIPIENTS, SAID
from ikpy.server.chat.streamed_lists import COHERE, FUNCTOOLS, GRANITE, NEMOTRON, PHI, TOOL_CALLS
from ikpy.server.chat.tagged_values import CODER, GLM, SEED
from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN, KIMI, LLAMA, SOLAR
from ikpy.server.chat.tool_reading import FUNCTION_HEAD, NamedCall, TaggedCall, ToolFormat

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
    mistral_list_call,
    markers=("[TOOL_CALLS]",),
    separator='", "',
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

FUNCTIONARY = ToolFormat(
    "functionary",
    "<function=",
    lambda: NamedCall("<function=", FUNCTION_HEAD, "</function>"),
    "call",
    function_call,
    r'"\n"?',
    others_of=code_readers,
)
GIGACHAT_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
GIGACHAT = ToolFormat(
    "gigachat",
    GIGACHAT_ROLE,
    lambda: TaggedCall(GIGACHAT_ROLE, "<|message_sep|>"),
    "call @{<|message_sep|>}?",
    json_call('{"name": '),
    markers=("<|message_sep|>", "<|role_sep|>"),
)
"""A message of another role: one call, as the template shows no more."""


def tool_format(template: str) -> ToolFormat | None:
    """How a template lets the model write calls; None when it knows no tools or an unsupported way.

    Templates of DeepSeek write the calls of a conversation but never show the tools: see `tool_prompt`.
    """
    if DEEPSEEK.opening in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_PLAIN
    if "tools" not in template:
        return None
    if DSML in template:  # its tags are put together
        return DEEPSEEK_DSML if "function_calls" in template else DEEPSEEK_V4
    if GCML in template:
        return GIGACHAT_GCML
    if "<|role_sep|>" in template and "function call" in template:  # its roles are put together
        return GIGACHAT
    if "<|/tool|>" in template:  # Phi-4-mini's own template shows tools, but no call
        return PHI
    for known, signs in SIGNS:
        if known.opening in template and all(sign in template for sign in signs):
            return known
    if is_lfm2(template):
        return LFM2
    return LLAMA if "<|python_tag|>" in template or '{"name": function name' in template else None


SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (RECIPIENTS, (RECIPIENTS.opening + SAID,)),
    (GLM, ("<arg_key>",)),
    (CODER, ("<function=", "<parameter=")),
    (SEED, ("<function=", "<parameter=")),
    (MINIMAX, ("<invoke ", "<parameter ")),
    (HARMONY, ("<|message|>",)),
    (GEMMA, (QUOTE,)),
    (MISTRAL_ARGS, ("[ARGS]",)),
    (KIMI, ()),
    (SOLAR, ("<|tool_call:begin|>",)),
    (COHERE, ("tool_name",)),
    (PHI, ("<|/tool_call|>",)),
    (GRANITE, ()),
    (TOOL_CALLS, ("<tool_calls>[",)),  # Apriel's, which speaks of <tool_call> as well
    (HERMES, ()),
    (NEMOTRON, ()),
    (TOOL_CALLS, ()),
    (MISTRAL, ()),
    (FUNCTOOLS, ()),
    (FUNCTIONARY, ("</function>",)),
)
"""What a template says beside the opening marker of a format; the first format that fits counts."""
