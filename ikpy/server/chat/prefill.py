"""An assistant message at the end of a conversation: the beginning of the answer, which the model continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikpy.server.chat.harmony import START
from ikpy.server.chat.recipients import MARK, SAID, has_recipients
from ikpy.server.chat.tags import HARMONY_TAGS, SOLAR_TAGS, Tags, ends_inside, is_harmony
from ikpy.vocab.templates import flat_content

FINAL = "<|channel|>final<|message|>"


def with_beginning(source: str, prompt: str, message: Mapping[str, Any], tags: Tags | None) -> tuple[str, bool]:
    """The prompt with a message behind it, and whether it ends inside reasoning.

    ``prompt`` ends where an answer begins. A tag with which the template opens reasoning there is left out: the model
    goes on with the content, unless the message has nothing but reasoning.
    """
    content, reasoning = flat_content(message.get("content")), message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = ""
    if is_harmony(source):
        return prompt + _in_channels(reasoning, content), bool(reasoning) and not content
    if has_recipients(source) and prompt.endswith(MARK):
        return f"{prompt}{SAID}\n{content}", False
    if tags == SOLAR_TAGS:
        thought = f"{tags[0]}{reasoning}" if reasoning else ""
        said = f"{tags[1] if reasoning else ''}<|content|>{content}" if content else ""
        return prompt + thought + said, bool(reasoning) and not content
    if tags is None or not (content or reasoning):
        return prompt + content, tags is not None and ends_inside(prompt, tags)
    opening, closing = tags
    if ends_inside(prompt, tags):
        prompt = prompt.rstrip().removesuffix(opening)
    if reasoning:
        content = f"{opening}\n{reasoning}" + (f"\n{closing}\n\n{content}" if content else "")
    return prompt + content, content.lstrip().startswith(opening) and closing not in content


def _in_channels(reasoning: str, content: str) -> str:
    """GPT-OSS: reasoning and content are messages of their own."""
    analysis, end = HARMONY_TAGS
    thought = f"{analysis}{reasoning}" if reasoning else ""
    if not content:
        return thought
    return f"{thought}{end}{START}{FINAL}{content}" if reasoning else FINAL + content
