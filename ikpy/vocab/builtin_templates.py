"""Built-in chat templates, by the names that ``--chat-template`` takes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

END_OF_SENTENCE = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True)
class Format:
    """Texts of one format. ``{C}`` is the content, ``{T}`` the content without blanks around it, ``{R}`` the
    role. ``other`` is used for roles without a text of their own, ``generation`` opens the answer."""

    system: str | None = None
    user: str | None = None
    assistant: str | None = None
    other: str | None = None
    generation: str = ""
    start: str = ""

    def source(self) -> str:
        """The format as a jinja2 template."""
        branches = [
            (f"m['role'] == '{role}'", text)
            for role, text in (("system", self.system), ("user", self.user), ("assistant", self.assistant))
            if text is not None
        ]
        parts = [_literal(self.start), "{%- for m in messages -%}", _branches(branches, self.other)]
        parts += ["{%- endfor -%}", _generation(self.generation)]
        return "".join(parts)


_VALUES = {"{C}": "m['content']", "{T}": "m['content'].strip()", "{R}": "m['role']"}


def _literal(text: str) -> str:
    """Jinja2 output of a text with ``{C}``, ``{T}`` and ``{R}`` in it."""
    pieces = [piece for piece in re.split(r"(\{[CTR]\})", text) if piece]
    values = [_VALUES.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces]
    return f"{{{{- {' ~ '.join(values)} -}}}}" if values else ""


def _branches(branches: list[tuple[str, str]], other: str | None) -> str:
    if not branches:
        return _literal(other or "")
    parts = [
        f"{{%- {'if' if number == 0 else 'elif'} {condition} -%}}{_literal(text)}"
        for number, (condition, text) in enumerate(branches)
    ]
    if other is not None:
        parts.append("{%- else -%}" + _literal(other))
    return "".join([*parts, "{%- endif -%}"])


def _generation(text: str) -> str:
    return f"{{%- if add_generation_prompt -%}}{_literal(text)}{{%- endif -%}}" if text else ""


def _turns(
    turn: str, system: str, user: str, assistant: str, *, inside_first: bool = False, next_turn: str = ""
) -> str:
    """[INST] formats: an instruction turn holds system and user texts and ends with the answer."""
    return "".join(
        [
            _literal(turn) if inside_first else "",
            f"{{%- set turn = namespace(inside={'true' if inside_first else 'false'}) -%}}",
            "{%- for m in messages -%}{%- if not turn.inside -%}",
            _literal(next_turn or turn),
            "{%- set turn.inside = true -%}{%- endif -%}",
            f"{{%- if m['role'] == 'system' -%}}{_literal(system)}",
            f"{{%- elif m['role'] == 'user' -%}}{_literal(user)}",
            f"{{%- else -%}}{_literal(assistant)}{{%- set turn.inside = false -%}}{{%- endif -%}}",
            "{%- endfor -%}",
        ]
    )


def _merged_system(keep: str, user: str, system: str, assistant: str, generation: str = "") -> str:
    """Formats that put the system text into the next user turn. ``user`` is split at ``{S}``."""
    before, after = user.split("{S}")
    return "".join(
        [
            "{%- set held = namespace(system='') -%}{%- for m in messages -%}",
            f"{{%- if m['role'] == 'system' -%}}{{%- set held.system = {keep} -%}}",
            f"{{%- elif m['role'] == 'assistant' -%}}{_literal(assistant)}",
            f"{{%- else -%}}{_literal(before)}",
            f"{{%- if held.system -%}}{{{{- held.system ~ {json.dumps(system)} -}}}}",
            "{%- set held.system = '' -%}{%- endif -%}",
            f"{_literal(after)}{{%- endif -%}}{{%- endfor -%}}{_generation(generation)}",
        ]
    )


def _same(text: str, generation: str, start: str = "") -> str:
    return Format(other=text, generation=generation, start=start).source()


def _llama2(system: str, content: str = "{C}", next_turn: str = "[INST] ") -> str:
    return _turns("[INST] ", system, f"{content} [/INST]", f"{content}</s>", inside_first=True, next_turn=next_turn)


_LLAMA2_SYSTEM = "<<SYS>>\n{C}\n<</SYS>>\n\n"
_DEEPSEEK3 = Format(
    system="{C}\n\n",
    user="<｜User｜>{C}",
    assistant="<｜Assistant｜>{C}" + END_OF_SENTENCE,
    generation="<｜Assistant｜>",
).source()
_COMMAND_R = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>{{T}}<|END_OF_TURN_TOKEN|>"
_MONARCH = (
    "{%- for m in messages -%}{%- if not loop.first -%}"
    + _literal("<s>")
    + "{%- endif -%}"
    + _literal("{R}\n{C}</s>\n")
    + "{%- endfor -%}"
    + _generation("<s>assistant\n")
)
_BAILING2 = (
    "{%- if not messages or messages[0]['role'] != 'system' -%}"
    + _literal("<role>SYSTEM</role>detailed thinking off<|role_end|>")
    + "{%- endif -%}"
    + Format(
        system="<role>SYSTEM</role>{C}<|role_end|>",
        user="<role>HUMAN</role>{C}<|role_end|>",
        assistant="<role>ASSISTANT</role>{C}<|role_end|>",
        generation="<role>ASSISTANT</role>",
    ).source()
)


def _vicuna(system: str) -> str:
    return Format(system=system, user="USER: {C}\n", assistant="ASSISTANT: {C}</s>\n", generation="ASSISTANT:").source()


def _bailing(generation: str) -> str:
    return Format(
        system="<role>SYSTEM</role>{C}",
        user="<role>HUMAN</role>{C}",
        assistant="<role>ASSISTANT</role>{C}",
        generation=generation,
    ).source()


BUILTIN_TEMPLATES: dict[str, str] = {
    "chatml": _same("<|im_start|>{R}\n{C}<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama2": _llama2("{C}\n"),
    "llama2-sys": _llama2(_LLAMA2_SYSTEM),
    "llama2-sys-bos": _llama2(_LLAMA2_SYSTEM, next_turn="<s>[INST] "),
    "llama2-sys-strip": _llama2(_LLAMA2_SYSTEM.replace("{C}", "{T}"), "{T}"),
    "mistral-v1": _turns(" [INST] ", "{C}\n\n", "{C} [/INST]", " {C}</s>"),
    "mistral-v3": _turns("[INST] ", "{C}\n\n", "{C}[/INST]", " {T}</s>"),
    "mistral-v3-tekken": _turns("[INST]", "{C}\n\n", "{C}[/INST]", "{C}</s>"),
    "mistral-v7": Format(
        system="[SYSTEM_PROMPT] {C}[/SYSTEM_PROMPT]", user="[INST] {C}[/INST]", assistant=" {C}</s>"
    ).source(),
    "phi3": _same("<|{R}|>\n{C}<|end|>\n", "<|assistant|>\n"),
    "falcon3": _same("<|{R}|>\n{C}\n", "<|assistant|>\n"),
    "falcon_e": _same("{R}{C}\n", "assistant\n"),
    "zephyr": _same("<|{R}|>\n{C}<|endoftext|>\n", "<|assistant|>\n"),
    "monarch": _MONARCH,
    "gemma": _merged_system(
        "held.system ~ m['content'].strip()",
        "<start_of_turn>{R}\n{S}{T}<end_of_turn>\n",
        "\n\n",
        "<start_of_turn>model\n{T}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "orion": _merged_system("held.system ~ m['content']", "Human: {S}{C}\n\nAssistant: </s>", "\n\n", "{C}</s>"),
    "openchat": Format(
        system="{C}<|end_of_turn|>",
        user="GPT4 Correct User: {C}<|end_of_turn|>",
        assistant="GPT4 Correct Assistant: {C}<|end_of_turn|>",
        generation="GPT4 Correct Assistant:",
    ).source(),
    "vicuna": _vicuna("{C}\n\n"),
    "vicuna-orca": _vicuna("SYSTEM: {C}\n"),
    "deepseek": Format(
        system="{C}",
        user="### Instruction:\n{C}\n",
        assistant="### Response:\n{C}\n<|EOT|>\n",
        generation="### Response:\n",
    ).source(),
    "deepseek2": Format(
        system="{C}\n\n",
        user="User: {C}\n\n",
        assistant="Assistant: {C}" + END_OF_SENTENCE,
        generation="Assistant:",
    ).source(),
    "deepseek3": _DEEPSEEK3,
    "deepseek4": _DEEPSEEK3,
    "command-r": Format(
        system=_COMMAND_R.format("SYSTEM"),
        user=_COMMAND_R.format("USER"),
        assistant=_COMMAND_R.format("CHATBOT"),
        generation="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ).source(),
    "llama3": _same(
        "<|start_header_id|>{R}<|end_header_id|>\n\n{T}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _same("<|header_start|>{R}<|header_end|>\n\n{T}<|eot|>", "<|header_start|>assistant<|header_end|>\n\n"),
    "chatglm3": _same("<|{R}|>\n {C}", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _same("<|{R}|>\n{C}", "<|assistant|>", "[gMASK]<sop>"),
    "minicpm": Format(user="<用户>{T}<AI>", other="{T}").source(),
    "exaone3": Format(
        system="[|system|]{T}[|endofturn|]\n",
        user="[|user|]{T}\n",
        assistant="[|assistant|]{T}[|endofturn|]\n",
        generation="[|assistant|]",
    ).source(),
    "rwkv-world": Format(system="{C}\n\n", user="User: {C}\n\nAssistant:", other="{C}\n\n").source(),
    "granite": _same(
        "<|start_of_role|>{R}<|end_of_role|>{C}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>\n",
    ),
    "gigachat": Format(
        system="{C}<|message_sep|>",
        user="user<|role_sep|>{C}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        assistant="assistant<|role_sep|>{C}<|message_sep|>",
        generation="assistant<|role_sep|>",
        start="<s>",
    ).source(),
    "megrez": _same("<|role_start|>{R}<|role_end|>{C}<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    "bailing": _bailing("<role>ASSISTANT</role>"),
    "bailing-think": _bailing("<role>ASSISTANT</role><think>"),
    "bailing2": _BAILING2,
    "hunyuan-moe": Format(
        system="<|startoftext|>{C}<|extra_4|>",
        assistant="<|startoftext|>{C}<|eos|>",
        other="<|startoftext|>{C}<|extra_0|>",
    ).source(),
    "kimi-k2": Format(
        system="<|im_system|>system<|im_middle|>{C}<|im_end|>",
        user="<|im_user|>user<|im_middle|>{C}<|im_end|>",
        assistant="<|im_assistant|>assistant<|im_middle|>{C}<|im_end|>",
        other="<|im_system|>{R}<|im_middle|>{C}<|im_end|>",
        generation="<|im_assistant|>assistant<|im_middle|>",
    ).source(),
    "gpt-oss": Format(
        assistant="<|start|>assistant<|message|>{C}<|return|>",
        other="<|start|>{R}<|message|>{C}<|end|>",
        generation="<|start|>assistant",
    ).source(),
    "bitnet": Format(system="System: {C}", user="User: {C}<|eot_id|>Assistant: ", other="{C}").source(),
    "grok-2": Format(
        system="System: {T}<|separator|>\n\n",
        user="Human: {T}<|separator|>\n\n",
        assistant="Assistant: {C}<|separator|>\n\n",
        generation="Assistant:",
    ).source(),
    "seed_oss": Format(
        assistant="<seed:bos>assistant\n{T}<seed:eos>",
        other="<seed:bos>{R}\n{C}<seed:eos>",
        generation="<seed:bos>assistant\n",
    ).source(),
    "dots1": Format(
        system="<|system|>{C}<|endofsystem|>",
        user="<|userprompt|>{C}<|endofuserprompt|>",
        assistant="<|response|>{C}<|endofresponse|>",
        generation="<|response|>",
    ).source(),
}
