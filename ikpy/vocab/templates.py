"""Chat templates: conversations to prompts with jinja2's sandbox.

The environment is the one model authors write for: blocks trimmed, loop controls, ``raise_exception``,
``strftime_now``, and ``tojson`` that keeps characters and key order as they are.
"""

from __future__ import annotations

import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ikpy.errors import FileFormatError, IkpyError, UsageError
from ikpy.vocab import keys
from ikpy.vocab.base import Vocab
from ikpy.vocab.builtin_templates import BUILTIN_TEMPLATES
from ikpy.vocab.template_limits import BoundedEnvironment, OutOfBoundsError, bounded_rendering, count

Message = Mapping[str, Any]


class _RaisedByTemplateError(TemplateRuntimeError):
    """The template itself called ``raise_exception``."""


class _RunsOnError(FileFormatError):
    """A template does more than any prompt needs."""


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks text for training; for prompts its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise _RaisedByTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    count(256 * len(pattern))  # the most that the C library is given room for
    return datetime.datetime.now().strftime(pattern)


def _dates() -> dict[str, str]:
    """The variables with the present time that templates of Llama 3 and Firefunction read."""
    now = datetime.datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y %H:%M:%S GMT")}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        {"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _line_of(error: BaseException) -> int | None:
    """Line of the template in which a rendering error happened."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None


class ChatTemplate:
    """A chat template and the texts of the tokens it may write.

    ``source`` is jinja2 text; ``bos`` and ``eos`` are the texts of those tokens ("" when there is none).
    A source that cannot be compiled raises FileFormatError with the line.
    """

    def __init__(self, source: str, bos: str = "", eos: str = ""):
        self.source = source
        self.bos = bos
        self.eos = eos
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FileFormatError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise FileFormatError("chat template: nested too deeply") from error
        except ValueError as error:  # numbers of thousands of digits
            raise FileFormatError(f"chat template: {error}") from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], vocab: Vocab) -> ChatTemplate:
        """Template a model brings along (key ``tokenizer.chat_template``), or names as files of RWKV do; ChatML if it
        brings none."""
        source = keys.text(metadata, "tokenizer.chat_template") or "chatml"
        source = BUILTIN_TEMPLATES.get(source, source)
        return cls(source, vocab.special_text(vocab.bos), vocab.special_text(vocab.eos))

    @classmethod
    def for_tools(cls, metadata: Mapping[str, Any], vocab: Vocab) -> ChatTemplate | None:
        """Template for conversations with tools (key ``tokenizer.chat_template.tool_use``); None if there is none."""
        source = keys.text(metadata, "tokenizer.chat_template.tool_use")
        return cls(source, vocab.special_text(vocab.bos), vocab.special_text(vocab.eos)) if source else None

    @classmethod
    def named(cls, name: str, bos: str = "", eos: str = "") -> ChatTemplate:
        """One of the built-in templates; an unknown name raises UsageError."""
        if name not in BUILTIN_TEMPLATES:
            known = ", ".join(sorted(BUILTIN_TEMPLATES))
            raise UsageError(f"the supplied chat template is not supported: {name}; known names: {known}")
        return cls(BUILTIN_TEMPLATES[name], bos, eos)

    @classmethod
    def from_argument(cls, text: str, bos: str = "", eos: str = "") -> ChatTemplate:
        """Template of a ``--chat-template`` value: a built-in name, or jinja2 text."""
        if "{{" in text or "{%" in text:
            return cls(text, bos, eos)
        return cls.named(text, bos, eos)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        drop_bos: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt for ``messages`` (mappings with ``role``, ``content`` and, if any, ``tool_calls``).

        ``continue_final_message``: a last assistant message is the beginning of the answer, left open.
        ``drop_bos``: leave out a BOS text at the start, for tokenizers that add the token themselves.
        Content parts of type text are joined by newlines and missing content is "", unless the template wants
        parts; arguments of tool calls become objects or JSON text if the template wants these. System messages go
        before the text of the next user message where the template does not show them.
        Other keyword arguments are template variables. Errors carry the template's line: UsageError for what
        the template itself rejects, FileFormatError for a broken template.
        """
        if any(message.get("role") == "system" for message in messages) and not self.shows_system:
            messages = _with_system_before_user(messages)
        prepared = [self._prepare(part) for message in messages for part in self._divided(message)]
        opening = ""
        if continue_final_message and prepared and prepared[-1].get("role") == "assistant":
            opening = flat_content(prepared.pop().get("content"))
            add_generation_prompt = True
        text = self._render(
            {**kwargs, "messages": prepared, "add_generation_prompt": add_generation_prompt, "tools": tools}
        )
        if drop_bos and self.bos:
            text = text.removeprefix(self.bos)
        return text + opening

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            with bounded_rendering(variables):
                given = {"bos_token": self.bos, "eos_token": self.eos, **_dates(), **variables}
                return self._template.render(given)
        except OutOfBoundsError as error:
            raise _RunsOnError(self._located(error)) from error
        except _RaisedByTemplateError as error:
            raise UsageError(self._located(error)) from error
        except SecurityError as error:
            raise FileFormatError(self._located(error, "not allowed: ")) from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise FileFormatError(self._located(error)) from error
        except (OverflowError, RecursionError, MemoryError) as error:
            raise FileFormatError(self._located(error, "out of bounds: ")) from error

    @staticmethod
    def _located(error: BaseException, prefix: str = "") -> str:
        line = _line_of(error)
        where = "chat template" if line is None else f"chat template, line {line}"
        message = " ".join(str(error).split()) or type(error).__name__
        return f"{where}: {prefix}{message}"

    def _divided(self, message: Message) -> list[Message]:
        """The message, or its text and its calls apart if the template would leave one of them out."""
        if not message.get("tool_calls") or not self.wants_calls_alone:
            return [message]
        calls = {**message, "content": None}
        if not flat_content(message.get("content")):
            return [calls]
        return [{name: value for name, value in message.items() if name != "tool_calls"}, calls]

    def _prepare(self, message: Message) -> dict[str, Any]:
        out = dict(message)
        if not out.get("tool_calls"):  # templates ask whether there is a list, not whether it is empty
            out.pop("tool_calls", None)
        elif self.wants_text_arguments:
            out["tool_calls"] = [_with_text_arguments(call) for call in out["tool_calls"]]
        elif self.wants_object_arguments:
            out["tool_calls"] = [self._with_object_arguments(call) for call in out["tool_calls"]]
        if out.get("tool_calls") and self.wants_calls_alone:
            return out
        if self.wants_content_parts:
            if isinstance(out.get("content"), str):
                out["content"] = [{"type": "text", "text": out["content"]}]
        elif "content" in out or not out.get("tool_calls"):
            out["content"] = flat_content(out.get("content"))
        return out

    def _probe(self, *messages: Message, **variables: Any) -> str:
        """Text for a conversation made up to see what the template understands; "" when it refuses."""
        try:
            return self._render({"messages": messages, "add_generation_prompt": False, "tools": None, **variables})
        except _RunsOnError:
            raise  # each of several probes would take as long
        except IkpyError:
            return ""

    @functools.cached_property
    def shows_system(self) -> bool:
        """Whether a system message appears in the prompt: some templates refuse it or leave it out (Gemma 2)."""
        user = self._prepare({"role": "user", "content": "<user needle>"})
        if "<user needle>" not in self._probe(user):
            return True
        system = self._prepare({"role": "system", "content": "<system needle>"})
        return "<system needle>" in self._probe(system, user)

    @functools.cached_property
    def shows_earlier_reasoning(self) -> bool:
        """Whether the reasoning of an answer stays in the prompt when the conversation has gone on."""
        user = self._prepare({"role": "user", "content": "probe"})
        answer = {"role": "assistant", "content": "probe", "reasoning_content": "<reasoning needle>"}
        return "<reasoning needle>" in self._probe(user, self._prepare(answer), user)

    @functools.cached_property
    def shows_several_calls(self) -> bool:
        """Whether all calls of a message appear in the prompt."""
        needles = "firstprobe", "secondprobe"
        calls = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for i, name in enumerate(needles)
        ]
        answer = self._prepare({"role": "assistant", "content": "", "tool_calls": calls})
        text = self._probe(self._prepare({"role": "user", "content": "probe"}), answer)
        return all(name in text for name in needles)

    @functools.cached_property
    def switches_thinking(self) -> bool:
        """Whether ``enable_thinking``, or ``thinking``, changes the prompt."""
        user = self._prepare({"role": "user", "content": "probe"})
        with_it, without = (
            self._probe(user, add_generation_prompt=True, enable_thinking=value, thinking=value, datetime="now")
            for value in (True, False)
        )
        return with_it != without

    @functools.cached_property
    def wants_content_parts(self) -> bool:
        """Whether content must be a list of parts: text given as a string does not appear in the prompt."""
        needle = "<content needle>"
        parts = [{"type": "text", "text": needle}]
        return needle not in self._probe({"role": "user", "content": needle}) and needle in self._probe(
            {"role": "user", "content": parts}
        )

    def _with_call(self, arguments: object, content: str | None) -> str:
        """Text of a conversation with a call."""
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        user = {"role": "user", "content": "probe"}
        return self._probe(user, {"role": "assistant", "content": content, "tool_calls": [call]})

    def _shows_call(self, arguments: object, content: str | None) -> bool:
        """Whether a call's arguments appear in the prompt, without quotes of their own."""
        text = self._with_call(arguments, content)
        return "needle" in text and '\\"needle' not in text

    def _with_object_arguments(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with its arguments as an object. Those that an answer's limit cut off stay text if the template can
        write it, so that the conversation goes on; clients send "" for no arguments."""
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            return dict(call)
        text = function["arguments"]
        try:
            arguments = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            if "needle" in self._with_call("needle", ""):
                return dict(call)
            name = function.get("name", "?")
            raise UsageError(f"arguments of the call of '{name}' are not valid JSON: {error}") from error
        return {**call, "function": {**function, "arguments": arguments}}

    @functools.cached_property
    def wants_calls_alone(self) -> bool:
        """Whether calls are written only for messages whose content is null (DeepSeek V3 and R1)."""
        text = '{"needle": 1}'
        return self._shows_call(text, None) and not self._shows_call(text, "")

    @functools.cached_property
    def wants_object_arguments(self) -> bool:
        """Whether arguments of tool calls must be objects: JSON text would be quoted once more or break, or stand where
        objects have a form of their own (Gemma 4)."""
        if not self._shows_call({"needle": 1}, ""):
            return False
        written = self._with_call({"needle": 1}, "")
        own_form = '"needle":' not in written and "'needle':" not in written  # neither JSON nor Python's text of it
        return own_form or not self._shows_call('{"needle": 1}', "")

    @functools.cached_property
    def wants_text_arguments(self) -> bool:
        """Whether arguments of tool calls must be JSON text: an object breaks the template."""
        content = None if self.wants_calls_alone else ""
        return self._shows_call('{"needle": 1}', content) and not self._shows_call({"needle": 1}, content)


def flat_content(content: Any) -> str:
    """Text of a message's content: parts of type text are joined by newlines. UsageError for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError("message content must be text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"unsupported content part of type '{kind}'; only 'text' parts can be used")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def _with_system_before_user(messages: Sequence[Message]) -> list[Message]:
    """The messages without system messages, whose texts begin the next message of the user, or are one."""
    out: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.get("role") == "system":
            waiting.append(flat_content(message.get("content")))
            continue
        if waiting and message.get("role") == "user":
            waiting.append(flat_content(message.get("content")))
            message = {**message, "content": "\n\n".join(waiting)}  # noqa: PLW2901
        elif waiting:
            out.append({"role": "user", "content": "\n\n".join(waiting)})
        out.append(message)
        waiting = []
    return [*out, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else out


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
