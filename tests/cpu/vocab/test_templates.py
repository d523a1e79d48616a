"""Chat templates against recorded prompts, built-in formats, the template environment, and errors."""

from __future__ import annotations

import datetime
import json

import pytest

from ikpy.errors import FileFormatError, UsageError
from ikpy.vocab import BUILTIN_TEMPLATES, ChatTemplate
from tests.cpu.vocab.vocab_data import metadata_of, tiny
from tests.shared import DATA

RECORDED = json.loads((DATA / "templates.json").read_text(encoding="utf-8"))
CONVERSATION = [
    {"role": "system", "content": " S "},
    {"role": "user", "content": " U "},
    {"role": "assistant", "content": " A "},
    {"role": "user", "content": "V"},
]
EOS = "<｜end▁of▁sentence｜>"
INSTRUCT = "[INST] <<SYS>>\n S \n<</SYS>>\n\n U  [/INST]"
FUNCTIONS = "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"
DEEPSEEK3 = f" S \n\n<｜User｜> U <｜Assistant｜> A {EOS}<｜User｜>V<｜Assistant｜>"
BAILING = (
    "<role>SYSTEM</role> S <role>HUMAN</role> U <role>ASSISTANT</role> A <role>HUMAN</role>V<role>ASSISTANT</role>"
)


def per_role(pattern: str, generation: str, start: str = "") -> str:
    """Formats that treat all roles alike: ``%r`` role, ``%c`` content, ``%t`` trimmed content."""
    turns = (("system", " S "), ("user", " U "), ("assistant", " A "), ("user", "V"))
    texts = (pattern.replace("%r", role).replace("%c", text).replace("%t", text.strip()) for role, text in turns)
    return start + "".join(texts) + generation


def command_r(role: str, text: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{text}<|END_OF_TURN_TOKEN|>"


# What every built-in format gives for CONVERSATION.
PROMPTS = {
    "chatml": per_role("<|im_start|>%r\n%c<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama2": "[INST]  S \n U  [/INST] A </s>[INST] V [/INST]",
    "llama2-sys": f"{INSTRUCT} A </s>[INST] V [/INST]",
    "llama2-sys-bos": f"{INSTRUCT} A </s><s>[INST] V [/INST]",
    "llama2-sys-strip": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]A</s>[INST] V [/INST]",
    "mistral-v1": " [INST]  S \n\n U  [/INST]  A </s> [INST] V [/INST]",
    "mistral-v3": "[INST]  S \n\n U [/INST] A</s>[INST] V[/INST]",
    "mistral-v3-tekken": "[INST] S \n\n U [/INST] A </s>[INST]V[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT]  S [/SYSTEM_PROMPT][INST]  U [/INST]  A </s>[INST] V[/INST]",
    "phi3": per_role("<|%r|>\n%c<|end|>\n", "<|assistant|>\n"),
    "falcon3": per_role("<|%r|>\n%c\n", "<|assistant|>\n"),
    "falcon_e": per_role("%r%c\n", "assistant\n"),
    "zephyr": per_role("<|%r|>\n%c<|endoftext|>\n", "<|assistant|>\n"),
    "monarch": per_role("<s>%r\n%c</s>\n", "<s>assistant\n").removeprefix("<s>"),
    "gemma": (
        "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"
    ),
    "orion": "Human:  S \n\n U \n\nAssistant: </s> A </s>Human: V\n\nAssistant: </s>",
    "openchat": (
        " S <|end_of_turn|>GPT4 Correct User:  U <|end_of_turn|>GPT4 Correct Assistant:  A <|end_of_turn|>"
        "GPT4 Correct User: V<|end_of_turn|>GPT4 Correct Assistant:"
    ),
    "vicuna": " S \n\nUSER:  U \nASSISTANT:  A </s>\nUSER: V\nASSISTANT:",
    "vicuna-orca": "SYSTEM:  S \nUSER:  U \nASSISTANT:  A </s>\nUSER: V\nASSISTANT:",
    "deepseek": (
        " S ### Instruction:\n U \n### Response:\n A \n<|EOT|>\n### Instruction:\nV\n### Response:\n"
    ),
    "deepseek2": f" S \n\nUser:  U \n\nAssistant:  A {EOS}User: V\n\nAssistant:",
    "deepseek3": DEEPSEEK3,
    "deepseek4": DEEPSEEK3,
    "command-r": (
        command_r("SYSTEM", "S") + command_r("USER", "U") + command_r("CHATBOT", "A") + command_r("USER", "V")
        + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "llama3": per_role(
        "<|start_header_id|>%r<|end_header_id|>\n\n%t<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": per_role(
        "<|header_start|>%r<|header_end|>\n\n%t<|eot|>", "<|header_start|>assistant<|header_end|>\n\n"
    ),
    "chatglm3": per_role("<|%r|>\n %c", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": per_role("<|%r|>\n%c", "<|assistant|>", "[gMASK]<sop>"),
    "minicpm": "S<用户>U<AI>A<用户>V<AI>",
    "exaone3": (
        "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|user|]V\n[|assistant|]"
    ),
    "rwkv-world": " S \n\nUser:  U \n\nAssistant: A \n\nUser: V\n\nAssistant:",
    "granite": per_role(
        "<|start_of_role|>%r<|end_of_role|>%c<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>\n"
    ),
    "gigachat": (
        f"<s> S <|message_sep|>user<|role_sep|> U {FUNCTIONS}assistant<|role_sep|> A <|message_sep|>"
        f"user<|role_sep|>V{FUNCTIONS}assistant<|role_sep|>"
    ),
    "megrez": per_role(
        "<|role_start|>%r<|role_end|>%c<|turn_end|>", "<|role_start|>assistant<|role_end|>"
    ),
    "bailing": BAILING,
    "bailing-think": f"{BAILING}<think>",
    "bailing2": (
        "<role>SYSTEM</role> S <|role_end|><role>HUMAN</role> U <|role_end|><role>ASSISTANT</role> A <|role_end|>"
        "<role>HUMAN</role>V<|role_end|><role>ASSISTANT</role>"
    ),
    "hunyuan-moe": (
        "<|startoftext|> S <|extra_4|><|startoftext|> U <|extra_0|><|startoftext|> A <|eos|>"
        "<|startoftext|>V<|extra_0|>"
    ),
    "kimi-k2": per_role("<|im_%r|>%r<|im_middle|>%c<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    "gpt-oss": per_role("<|start|>%r<|message|>%c<|end|>", "<|start|>assistant").replace(
        " A <|end|>", " A <|return|>"
    ),
    "bitnet": "System:  S User:  U <|eot_id|>Assistant:  A User: V<|eot_id|>Assistant: ",
    "grok-2": (
        "System: S<|separator|>\n\nHuman: U<|separator|>\n\nAssistant:  A <|separator|>\n\n"
        "Human: V<|separator|>\n\nAssistant:"
    ),
    "dots1": (
        "<|system|> S <|endofsystem|><|userprompt|> U <|endofuserprompt|><|response|> A <|endofresponse|>"
        "<|userprompt|>V<|endofuserprompt|><|response|>"
    ),
    "seed_oss": per_role("<seed:bos>%r\n%c<seed:eos>", "<seed:bos>assistant\n").replace(" A ", "A"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BUILTIN_TEMPLATES))
def test_builtin_format(name):
    template = ChatTemplate.named(name)
    assert template.render(CONVERSATION) == PROMPTS[name]
    without = template.render(CONVERSATION, add_generation_prompt=False)
    assert PROMPTS[name].startswith(without)


def test_every_builtin_format_has_a_prompt():
    assert set(PROMPTS) == set(BUILTIN_TEMPLATES)


def test_bailing2_without_system_text():
    prompt = ChatTemplate.named("bailing2").render([{"role": "user", "content": "U"}])
    assert prompt.startswith("<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>U")


@pytest.mark.parametrize("case", RECORDED["cases"], ids=[case["name"] for case in RECORDED["cases"]])
def test_recorded_prompt(case):
    source = RECORDED["sources"][case["model"]]
    bos = "<|begin_of_text|>"
    template = ChatTemplate(source if case["jinja"] else BUILTIN_TEMPLATES["phi3"], bos, "<|end_of_text|>")
    request = case["request"]
    prompt = template.render(
        request["messages"],
        request.get("add_generation_prompt", True),
        request.get("tools"),
        continue_final_message=True,
        drop_bos=True,
        **request.get("chat_template_kwargs", {}),
    )
    assert prompt == case["prompt"]


def test_template_of_the_bundled_model():
    template = ChatTemplate.from_metadata(metadata_of("tiny-mla-moe-f16.gguf"), tiny())
    messages = [{"role": "user", "content": "Hello"}]
    assert template.render(messages) == "<|begin_of_text|><|user|>Hello<|end|><|assistant|>"
    ids = tiny().tokenize(template.render(messages, drop_bos=True), parse_special=True)
    assert ids[0] == tiny().bos
    assert ids.count(tiny().bos) == 1
    assert ChatTemplate.from_metadata({}, tiny()).source == BUILTIN_TEMPLATES["chatml"]


def render(source: str, *messages, **kwargs) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **kwargs)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'b': 'é<', 'a': [1, true, none]} | tojson }}", '{"b": "é<", "a": [1, true, null]}'),
        ("{{ [{'f': {'b': 1}}] | map(attribute='f') | tojson }}", '[{"b": 1}]'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{% generation %}x{{ eos_token }}{% endgeneration %}", "x</s>"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ bos_token }}", "2<s>"),
        ("{{ ' a '.strip() }}{{ 'ab'[::-1] }}{{ 'x,y'.split(',')[1] }}", "abay"),
        ("{{ missing is defined }}{{ missing }}", "False"),
    ],
)
def test_environment(source, want):
    assert render(source) == want


def test_variables_and_time():
    assert render("{{ x }}{{ tools[0].name }}", x=3, tools=[{"name": "t"}]) == "3t"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_templates_that_ask_for_the_date_get_it():
    today = datetime.datetime.now().strftime("%d %b %Y")
    source = (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}Today: {{ date_string }}"
    )
    assert render(source) == f"Today: {today}"
    assert ChatTemplate(source).render([], date_string="1 May 2025") == "Today: 1 May 2025"
    assert render("{{ datetime }}").startswith(datetime.datetime.now().strftime("%b %d %Y "))


def test_content_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb"
    wants_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert render(wants_parts, {"role": "user", "content": "a"}) == "a;"
    assert render(wants_parts, {"role": "user", "content": parts}) == "a;b;"
    with pytest.raises(UsageError, match="part of type 'image_url'"):
        render("{{ messages[0].content }}", {"role": "user", "content": [{"type": "image_url"}]})


def test_tool_arguments_stay_text_where_the_template_quotes_nothing():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert render(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == '{"a": 1}'
    quoting = source.replace("arguments }}", "arguments | tojson }}")
    assert render(quoting, {"role": "assistant", "content": None, "tool_calls": [call]}) == '{"a": 1}'
    listing = source.replace(
        "{{ c.function.arguments }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    )
    assert render(listing, {"role": "assistant", "content": None, "tool_calls": [call]}) == "a=1"
    for broken in ('{"a', "[" * 5000):
        call["function"]["arguments"] = broken
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert json.loads(render(quoting, message)) == broken, "what a limit cut off is shown as text"
        with pytest.raises(UsageError, match="arguments of the call of 'f' are not valid JSON"):
            render(listing, message)
    call["function"]["arguments"] = ""
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (render(quoting, message), render(listing, message)) == ("{}", "")


def test_arguments_become_objects_where_the_template_has_a_form_of_its_own_for_them():
    # Gemma 4 writes objects as call:f{a:1} and leaves text as it is, which would stand between two pairs of braces.
    loop = "{% for k, v in args | dictsort %}{{ k }}:{{ v }}{% endfor %}"
    written = "{% if args is mapping %}" + loop + "{% elif args is string %}{{ args }}{% endif %}"
    body = "{% set args = c.function.arguments %}call:f{{ '{' }}" + written + "{{ '}' }}"
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + body + "{% endfor %}{% endfor %}"

    def shown(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return render(source, {"role": "assistant", "content": None, "tool_calls": [call]})

    assert shown('{"a": 1}') == shown({"a": 1}) == "call:f{a:1}"
    assert (shown(""), shown('{"a')) == ("call:f{}", 'call:f{{"a}')


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("a\n{% if %}", FileFormatError, "chat template, line 2: "),
        ("a\n\n{% endfor %}", FileFormatError, "chat template, line 3: "),
        ("a\n{{ raise_exception('roles\\nmust alternate') }}", UsageError, "line 2: roles must alternate"),
        ("a\n{{ messages[0].content.x.y }}", FileFormatError, "line 2: .*no attribute 'x'"),
        ("a\n{{ 1 / 0 }}", FileFormatError, "line 2: division by zero"),
        ("{{ ''.__class__.__mro__ }}", FileFormatError, "not allowed"),
        ("{{ messages.append(1) }}", FileFormatError, "not allowed"),
        ("{% for i in range(10000000) %}{% endfor %}", FileFormatError, "line 1"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", FileFormatError, "recursion"),
        ("{% include 'x' %}", FileFormatError, "line 1"),
    ],
)
def test_errors_name_the_line(source, error, message):
    with pytest.raises(error, match=message) as caught:
        render(source, {"role": "user", "content": "x"})
    assert "\n" not in str(caught.value)


def test_unknown_name():
    with pytest.raises(UsageError, match="the supplied chat template is not supported: zzz; known names: bailing"):
        ChatTemplate.from_argument("zzz")
    assert ChatTemplate.from_argument("chatml").source == BUILTIN_TEMPLATES["chatml"]
    assert ChatTemplate.from_argument("{{ 1 }}").render([]) == "1"


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_none(calls):
    shown = "{% if m.tool_calls is defined and m.tool_calls is not none %}<calls>{% endif %}"
    template = ChatTemplate(f"{{% for m in messages %}}{shown}{{% endfor %}}")
    assert template.render([{"role": "assistant", "content": "a", "tool_calls": calls}]) == ""


@pytest.mark.parametrize("content", ["''", "m.content"])
@pytest.mark.parametrize("arguments", ['{"a": "ä"}', {"a": "ä"}])
def test_arguments_become_text_where_an_object_breaks_the_template(content, arguments):
    condition = "{% if m.content is none %}" if content == "''" else "{% if m.tool_calls %}"
    body = "{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endif %}"
    template = ChatTemplate("{% for m in messages %}" + condition + body + "{% endfor %}")
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert template.render([{"role": "assistant", "content": None, "tool_calls": calls}]) == '<{"a": "ä"}>'


QUEUE = """{% set queue = namespace(ids=[]) %}{% for m in messages %}{% if m.role == 'assistant' %}\
{% set _ = queue.ids.append(m.content) %}{% elif queue.ids %}{{ queue.ids.pop(0) }}{{ m.content }};\
{% endif %}{% endfor %}"""


def test_a_template_may_change_its_own_lists():
    """The templates for Kimi K2 that come with llama.cpp remember the ids of calls like this."""
    messages = [
        {"role": role, "content": text} for role, text in (("assistant", "a"), ("assistant", "b"), ("user", "c"))
    ]
    template = ChatTemplate(QUEUE)
    assert template.render(messages) == template.render(messages) == "ac;"
    assert render("{% set own = messages[:] %}{% set _ = own.append(1) %}{{ own | length }}", *messages) == "4"
    for change in ("tools.append(1)", "tools[0].pop()", "messages[0].pop('role')", "x.l.insert(0, 1)", "own.sort()"):
        with pytest.raises(FileFormatError, match="not allowed"):
            render(f"{{% set own = [2, 1] %}}{{{{ {change} }}}}", *messages, tools=[[1]], x={"l": []})


def test_a_list_that_grows_on_and_on_is_bounded():
    grow = "{% for i in range(99999) %}{% set _ = l.append(l) %}{% endfor %}"
    with pytest.raises(FileFormatError, match=r"steps|characters|seconds"):
        render(f"{{% set l = [1] %}}{{% for i in range(99999) %}}{grow}{{% endfor %}}")


SHOWN = "<{{ m.role }}>{{ m.content }}"
REFUSES = f"{{% for m in messages %}}{{{{ raise_exception('no') if m.role == 'system' }}}}{SHOWN}{{% endfor %}}"
LEAVES_OUT = f"{{% for m in messages if m.role != 'system' %}}{SHOWN}{{% endfor %}}"


@pytest.mark.parametrize("source", [REFUSES, LEAVES_OUT])
def test_system_messages_go_before_the_users_where_a_template_does_not_show_them(source):
    template = ChatTemplate(source)
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}
    answer = {"role": "assistant", "content": "A"}
    assert template.render([system, user, answer, user]) == "<user>S\n\nU<assistant>A<user>U"
    assert template.render([system, system, answer, system]) == "<user>S\n\nS<assistant>A<user>S"
    assert template.render([user]) == "<user>U"
    shown = ChatTemplate(f"{{% for m in messages %}}{SHOWN}{{% endfor %}}")
    assert shown.render([system, user]) == "<system>S<user>U"
