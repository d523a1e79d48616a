"""Tags around reasoning and answers, found in templates."""

from __future__ import annotations

from ikpy.server.chat.harmony import HARMONY

Tags = tuple[str, str]

REASONING_TAGS: tuple[Tags, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("Here is my thought process:", "Here is my response:"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("<|channel>thought", "<channel|>"),
)
SOLAR_BEGIN = "<|begin|>assistant"
SOLAR_NEXT = "<|end|>" + SOLAR_BEGIN
"""Solar Open: the end of one part of an answer and the beginning of the next. A token that ends the text ends the last
one."""
SOLAR_TAGS = ("<|think|>", SOLAR_NEXT)
HARMONY_TAGS = ("<|channel|>analysis<|message|>", "<|end|>")
ANSWER_TAGS: tuple[tuple[str, Tags], ...] = (
    ("<|START_RESPONSE|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ("<|START_TEXT|>", ("<|START_TEXT|>", "<|END_TEXT|>")),
    ("<response></response>", ("<response>", "</response>")),
    ("</answer>", ("<answer>", "</answer>")),
    (SOLAR_BEGIN, ("<|content|>", SOLAR_NEXT)),
)
"""What a template says, and the tags that it means: those of Granite alone also stand around results of tools. Those
with `answer` are Hunyuan's."""


def reasoning_tags(source: str) -> Tags | None:
    """What a template puts around reasoning, None if it knows none."""
    if is_harmony(source):
        return HARMONY_TAGS
    if SOLAR_BEGIN in source and SOLAR_TAGS[0] in source:
        return SOLAR_TAGS
    return next((tags for tags in REASONING_TAGS if tags[0] in source), None)


def ends_inside(prompt: str, tags: Tags) -> bool:
    """Whether a prompt ends with the tag that opens reasoning."""
    return prompt.rstrip().endswith(tags[0])


def answer_tags(source: str) -> Tags | None:
    """What a template puts around the content of an answer, None if it knows none."""
    return next((tags for sign, tags in ANSWER_TAGS if sign in source), None)


def is_harmony(source: str) -> bool:
    """Whether a template divides answers into channels."""
    return HARMONY.opening in source and "<|message|>" in source
