"""Templates of single families, in small: earlier calls in the prompt, forced calls, tools where they are wanted."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.chat.call_grammar import control_tokens, marker_rule
from ikpy.server.chat.rendering import fitted
from ikpy.server.chat.streamed_lists import GRANITE as TOOLS_OF_GRANITE
from ikpy.server.chat.streamed_lists import PHI
from ikpy.server.chat.tags import answer_tags, reasoning_tags
from ikpy.server.chat.tool_fields import with_all_fields
from ikpy.server.chat.tool_formats import HERMES, tool_format
from ikpy.vocab import ChatTemplate, Vocab
from tests.cpu.vocab.vocab_data import made
from tests.server.harness import read_events, running, start_server

ARGUMENTS = {"path": "a b", "lines": [1, 2]}
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"enum": ["a b", "c"]},
                "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
            },
            "required": ["path"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps(ARGUMENTS)}}
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "text"},
]
MINIMAX = """]~b]system
{% if tools %}<tools>{% for t in tools %}<tool>{{ t.function | tojson }}</tool>{% endfor %}</tools>
<minimax:tool_call>
<invoke name="tool-name">
<parameter name="key">value</parameter>
</invoke>
</minimax:tool_call>
{% endif %}[e~[
{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{% if m.tool_calls %}<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}\
</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% elif m.role == 'tool' %}<response>{{ m.content }}</response>\
{% else %}{{ m.content }}{% endif %}[e~[
{% endfor %}{% if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
GRANITE = """{% if tools %}<|start_of_role|>system<|end_of_role|>respond with <|tool_call|> and a JSON list of tools.\
{% if thinking %} Thoughts between <think></think>, the response between <response></response>.{% endif %}\
<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}{% endif %}\
{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}\
{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
COHERE = """<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{% if tools %}Write "tool_name" and "parameters".\
{{ tools | tojson }}{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>\
{% if m.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>[
{% for c in m.tool_calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", \
"parameters": {{ c.function.arguments | tojson }}}
{% endfor %}]<|END_ACTION|>{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}\
<|END_RESPONSE|>{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}{% endfor %}\
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"""
PHI_OWN = """{% for m in messages %}{% set message = m %}\
{% if m['role'] == 'system' and 'tools' in message and message['tools'] is not none %}\
{{ '<|system|>' + m['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}\
{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DSML = """{% set d = '｜DSML｜' %}{% if tools %}{{ tools | tojson }}<{{ d }}function_calls>{% endif %}\
{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}{% if m.tool_calls %}<{{ d }}function_calls>
{% for c in m.tool_calls %}<{{ d }}invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<{{ d }}parameter name="{{ k }}" string="{{ 'true' if v is string else \
'false' }}">{{ v if v is string else v | tojson }}</{{ d }}parameter>
{% endfor %}</{{ d }}invoke>
{% endfor %}</{{ d }}function_calls>{% endif %}{% endfor %}<｜assistant｜>"""
FUNCTIONARY = """{% if tools %}{{ tools | tojson }}Begin with <function= and end with </function>{% endif %}\
{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% for c in m.tool_calls or [] %}\
{% if c.function.name == 'python' %}{{ '<|python_tag|>' + c.function.arguments }}{% else %}\
{{ '<function=' + c.function.name + '>' + c.function.arguments + '</function>' }}{% endif %}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"""
RECIPIENTS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}\
<|end_header_id|>{% if m.role != 'assistant' %}{{ m.content }}{% elif m.content %}\
{{ '>>>all\n' + m.content }}{% endif %}\
{% for c in m.tool_calls or [] %}{{ '>>>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>>>>{% endif %}"""
SOLAR = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|begin|>{{ m.role }}\
{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|end|><|begin|>assistant{% endif %}\
{% if m.tool_calls %}<|tool_calls|>{% for c in m.tool_calls %}<|tool_call:begin|>{{ c.id }}<|tool_call:name|>\
{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments }}<|tool_call:end|>{% endfor %}<|calls|>\
{% else %}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|begin|>assistant{% endif %}"""
FIREFUNCTION = """{{ 'Write functools[{"name": ...}]. Functions: ' + functions }}Today is {{ datetime }}.\
{% for m in messages %}{% set ns = namespace(calls=[]) %}{% for c in m.tool_calls or [] %}\
{% set ns.calls = ns.calls + ['{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}'] %}\
{% endfor %}<{{ m.role }}>{{ m.content }}{% if ns.calls %}{{ ' functools[' + ns.calls | join(', ') + ']' }}{% endif %}\
{% endfor %}<assistant>"""
GIGACHAT = """{% set sep = namespace(role="<|role_sep|>\n", message="<|message_sep|>\n\n") %}\
{% if tools %}{{ 'function descriptions' + sep.role }}{{ tools | tojson }}{{ sep.message }}{% endif %}\
{% for m in messages %}{{ ('function result' if m.role == 'tool' else m.role) + sep.role + m.content + sep.message }}\
{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{{ 'function call' + sep.role }}\
{{ '{"name": "' + call.name + '", "arguments": ' }}\
{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' + sep.message }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant' + sep.role }}{% endif %}"""
LIST = '[{"name": "read", "arguments": {"path": "a b", "lines": [1, 2]}}]'
GCML = DSML.replace("DSML", "GCML").replace("function_calls", "tool_calls") + "{# function call<|role_sep|> #}"
SHOWN = {
    "minimax": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="read">\n<parameter name="path">a b</parameter>\n'
        '<parameter name="lines">[1, 2]</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n]~b]tool\n'
        "<response>text</response>[e~[\n]~b]ai\n<think>\n",
    ),
    "granite": (GRANITE, f"<|tool_call|>{LIST}<|start_of_role|>tool<|end_of_role|>text"),
    "cohere": (
        COHERE,
        '<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "read", '
        '"parameters": {"path": "a b", "lines": [1, 2]}}\n]<|END_ACTION|>',
    ),
    "phi": (
        PHI_OWN,
        f"<|user|>Hi<|end|><|assistant|><|tool_call|>{LIST}<|/tool_call|><|end|><|tool_response|>text<|end|>"
        "<|assistant|>",
    ),
    "functionary": (FUNCTIONARY, f"<function=read>{json.dumps(ARGUMENTS)}</function><|start_header_id|>tool"),
    "solar": (
        SOLAR,
        "<|begin|>assistant<|think|>I look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>c1"
        f"<|tool_call:name|>read<|tool_call:args|>{json.dumps(ARGUMENTS)}<|tool_call:end|><|calls|><|begin|>tool<|content|>text<|end|>",
    ),
    "functionary-recipients": (
        RECIPIENTS,
        f"assistant<|end_header_id|>>>>read\n{json.dumps(ARGUMENTS)}<|start_header_id|>tool",
    ),
    "functools": (FIREFUNCTION, f"<assistant> functools{LIST}<tool>text<assistant>"),
    "gigachat": (
        GIGACHAT,
        "user<|role_sep|>\nHi<|message_sep|>\n\nassistant<|role_sep|>\n<|message_sep|>\n\nfunction call<|role_sep|>\n"
        f"{LIST[1:-1]}<|message_sep|>\n\nfunction result<|role_sep|>\ntext<|message_sep|>\n\nassistant<|role_sep|>\n",
    ),
    "gigachat-gcml": (
        GCML,
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="read">\n<｜GCML｜parameter name="path" string="true">a b'
        '</｜GCML｜parameter>\n<｜GCML｜parameter name="lines" string="false">[1, 2]</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
    ),
    "deepseek-dsml": (
        DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n<｜DSML｜parameter name="path" string="true">a b'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="lines" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_calls_of_a_conversation_and_forced_ones(name: str) -> None:
    template, shown = SHOWN[name]
    found = tool_format(template)
    assert found is not None and found.name == name
    with running(f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {shlex.quote(template)}") as client:
        response = client.post("/apply-template", json={"messages": MESSAGES, "tools": [TOOL]})
        assert response.status_code == 200, response.text
        assert shown in response.json()["prompt"] and '"description": "Reads."' in response.json()["prompt"]
        body = {"messages": MESSAGES[:1], "tools": [TOOL], "temperature": 0, "max_tokens": 600}
        for choice in ("required", {"type": "function", "function": {"name": "read"}}):
            body |= {"tool_choice": choice, "thinking_budget_tokens": 3}
            answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
            calls = answer["message"]["tool_calls"]
            assert all(c["function"]["name"] == "read" for c in calls)
            given = json.loads(calls[0]["function"]["arguments"])
            assert given["path"] in ("a b", "c") and all(isinstance(line, int) for line in given.get("lines", []))
        events = read_events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)[:-1]
        deltas = [e["data"]["choices"][0]["delta"] for e in events if e["data"]["choices"]]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        streamed = "".join(p["function"].get("arguments", "") for p in pieces if p["index"] == 0)
        assert streamed == calls[0]["function"]["arguments"]


def test_recipients_are_no_part_of_answers() -> None:
    with running(f"llama-server -m PUPPET -t 1 -c 512 -np 1 --chat-template {shlex.quote(RECIPIENTS)}") as client:
        body = {"messages": MESSAGES[:1], "max_tokens": 40, "grammar": r'''root ::= "all\nHi there"'''}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Hi there"}
        begun = [*MESSAGES[:1], {"role": "assistant", "content": "I s"}]
        prompt = client.post("/apply-template", json={"messages": begun}).json()["prompt"]
        assert prompt.endswith("assistant<|end_header_id|>>>>all\nI s")


def test_beginnings_of_solar_answers() -> None:
    with running(f"llama-server -m PUPPET -t 1 -c 512 -np 1 --chat-template {shlex.quote(SOLAR)}") as client:
        begun = {"role": "assistant", "content": "I s"}
        for fields, end in (
            (begun, "<|content|>I s"),
            (begun | {"reasoning_content": "Hm."}, "<|think|>Hm.<|end|><|begin|>assistant<|content|>I s"),
            (begun | {"reasoning_content": "Hm.", "content": ""}, "<|think|>Hm."),
        ):
            prompt = client.post("/apply-template", json={"messages": [*MESSAGES[:1], fields]}).json()["prompt"]
            assert prompt.endswith(f"<|begin|>assistant{end}")


def test_a_template_that_wants_the_text_of_functions_without_any() -> None:
    with running(f"llama-server -m PUPPET -t 1 -c 256 -np 1 --chat-template {shlex.quote(FIREFUNCTION)}") as client:
        prompt = client.post("/apply-template", json={"messages": MESSAGES[:1]}).json()["prompt"]
    assert "Functions: Today is " in prompt and prompt.endswith("<user>Hi<assistant>")


def test_tools_in_a_field_of_the_system_message() -> None:
    def prompt(*messages: dict[str, Any], tools: list[dict[str, Any]]) -> str:
        return ChatTemplate(PHI_OWN).render(fitted(PHI_OWN, list(messages), tools, PHI if tools else None))

    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    listed = json.dumps([TOOL["function"]])
    assert prompt(user, tools=[TOOL]) == f"<|system|><|tool|>{listed}<|/tool|><|end|><|user|>Hi<|end|><|assistant|>"
    assert prompt(system, user, tools=[TOOL]).startswith(f"<|system|>Be brief.<|tool|>{listed}<|/tool|><|end|>")
    assert prompt(system, user, tools=[]) == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    cut = {"role": "assistant", "content": "So.", "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}]}
    assert '<|assistant|>So.<|tool_call|>[{"name": "f", "arguments": "{\\"a"}]<|/tool_call|>' in prompt(cut, tools=[])


def test_calls_that_a_template_leaves_out_are_text() -> None:
    """Granite 3.3 shows roles and contents alone."""
    begin, end = GRANITE.index("{% if m.tool_calls %}"), GRANITE.index("{% endif %}{% endfor %}") + len("{% endif %}")
    template = GRANITE[:begin] + GRANITE[end:]
    said = {"role": "assistant", "content": "So. ", "tool_calls": [CALL, CALL]}
    text = ChatTemplate(template).render(fitted(template, [MESSAGES[0], said, MESSAGES[2]], [TOOL], TOOLS_OF_GRANITE))
    call = f'{{"name": "read", "arguments": {json.dumps(ARGUMENTS)}}}'
    assert f"assistant<|end_of_role|>So. <|tool_call|>[{call}, {call}]<|start_of_role|>tool<|end_of_role|>text" in text
    shown = ChatTemplate(GRANITE).render(fitted(GRANITE, MESSAGES, [TOOL], TOOLS_OF_GRANITE))
    assert shown.count("<|tool_call|>") == 1, "the template writes them itself"


def test_results_in_a_field_of_the_calls() -> None:
    """The first templates of Gemma 4 know no role of results."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}call:{{ c.function.name }};{% endfor %}"
        "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response.n if r.response is mapping else r.response }};"
        "{% endfor %}{{ m.content }}{% endfor %}"
    )

    def prompt(*messages: dict[str, Any], source: str = template) -> str:
        return ChatTemplate(source).render(fitted(source, list(messages), [TOOL], None))

    user, done = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Done."}
    other = {"id": "c2", "type": "function", "function": {"name": "count", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, other]}
    results = ({"role": "tool", "tool_call_id": "c2", "content": '{"n": 3}'}, MESSAGES[2])
    asked = "<user>Hi<assistant>I look.<assistant>call:read;call:count;count=3;read=text;"
    assert prompt(user, said, *results) == asked
    assert prompt(user, said, *results, done, user) == f"{asked}Done.<user>Hi"
    assert prompt(user, said, *results, done) == f"{asked}<assistant>Done.", "it may be the beginning of the answer"
    assert prompt(user, said, *results, done, done, user) == f"{asked}Done.<assistant>Done.<user>Hi"
    nameless = said | {
        "tool_calls": [{key: value for key, value in call.items() if key != "id"} for call in (CALL, other)]
    }
    answers = [{"role": "tool", "content": text} for text in ("text", '{"n": 3}')]
    in_turn = "<user>Hi<assistant>I look.<assistant>call:read;call:count;read=text;count=3;"
    assert prompt(user, nameless, *answers) == in_turn, "results without ids are those of the calls in their order"
    newer = template + "{# m.role != 'tool' #}"
    assert "<tool>text" in prompt(user, said, *results, source=newer), "a template that writes results itself"


def test_tools_in_a_variable_of_their_own() -> None:
    template = (
        "{% if xml_tools %}<tools>{% for t in xml_tools %}{{ t.name }}{% endfor %}</tools><tool_call>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"
    )
    assert tool_format(template) is HERMES
    with running(f"llama-server -m PUPPET -t 1 -c 256 -np 1 --chat-template {shlex.quote(template)}") as client:
        body = {"messages": MESSAGES, "tools": [TOOL]}
        text = client.post("/apply-template", json=body).json()["prompt"]
        call = f'<tool_call>\n{{"name": "read", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
        assert text == (
            f"<tools>read</tools><tool_call><|im_start|>user Hi<|im_start|>assistant {call}<|im_start|>tool text"
        )
        body["chat_template_kwargs"] = {"xml_tools": []}
        assert client.post("/apply-template", json=body).json()["prompt"].startswith("<|im_start|>user")


def test_what_was_said_before_a_call_is_its_plan() -> None:
    def plan(**fields: Any) -> str:
        return fitted(COHERE, [{"role": "assistant", "tool_calls": [CALL]} | fields], [], None)[0]["tool_plan"]

    assert plan(content="Said.", reasoning_content="Thought.") == "Thought."
    assert plan(content="Said.") == "Said." and plan(content=None) == "" and plan(content=None, tool_plan="x") == "x"
    said = [{"role": "assistant", "content": "Done."}]
    assert fitted(COHERE, said, [], None) == said


def test_a_template_for_tools_alone() -> None:
    plain, tools = "{% for m in messages %}{{ m.content }}{% endfor %}", "TOOLS {{ tools }}{{ messages[0].content }}"
    metadata = {"tokenizer.chat_template": plain, "tokenizer.chat_template.tool_use": tools}
    server = start_server("llama-server -m PUPPET -t 1 -c 256 -np 1")
    try:
        client, front, vocab = TestClient(server.app), server.front, server.front.vocab
        assert ChatTemplate.for_tools({"tokenizer.chat_template": plain}, vocab) is None
        assert front.tool_template is front.template, "the model has one template"
        front.template = ChatTemplate.from_metadata(metadata, vocab)
        front.tool_template = ChatTemplate.for_tools(metadata, vocab) or front.template
        user = [{"role": "user", "content": "Hi"}]
        with_tools = client.post("/apply-template", json={"messages": user, "tools": [TOOL]}).json()["prompt"]
        assert with_tools.startswith("TOOLS [") and with_tools.endswith("Hi")
        assert client.post("/apply-template", json={"messages": user}).json()["prompt"] == "Hi"
        props = client.get("/props").json()
        assert (props["chat_template"], props["chat_template_tool_use"]) == (plain, tools)
        assert "tools" in client.post("/api/show", json={"model": "m"}).json()["capabilities"]
    finally:
        server.engine.stop(10)


def test_tags_of_templates() -> None:
    assert reasoning_tags(COHERE) == ("<|START_THINKING|>", "<|END_THINKING|>")
    assert answer_tags(COHERE) == ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    assert answer_tags("<|START_TEXT|>") == ("<|START_TEXT|>", "<|END_TEXT|>")
    assert answer_tags(GRANITE) == ("<response>", "</response>") and reasoning_tags(GRANITE) == ("<think>", "</think>")
    assert answer_tags(MINIMAX) is None, "responses are results of tools there"
    phrases = "'Here is my thought process:' and 'Here is my response:'"
    assert reasoning_tags(phrases) == ("Here is my thought process:", "Here is my response:")
    steps = "'[BEGIN FINAL RESPONSE]' ... {{ 'Here are my reasoning steps:\n' }}"  # Apriel 1.6's prompt ends with these
    assert reasoning_tags(steps) == ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    gemma = "{{ '<|channel>thought\\n<channel|>' }}"
    assert reasoning_tags(gemma) == ("<|channel>thought", "<channel|>")


def test_reasoning_before_a_call_in_channels() -> None:
    """GPT-OSS reads it from a field of its own, and refuses content beside it."""
    source = "<|channel|><|message|>{{ message.thinking }}"
    thought, said, other = fitted(
        source,
        [
            {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
            {"role": "assistant", "content": "See.", "reasoning_content": "I look.", "tool_calls": [CALL]},
            {"role": "assistant", "content": "See.", "reasoning_content": "I look."},
        ],
        [],
        None,
    )
    assert (thought["thinking"], thought["content"]) == ("I look.", "")
    assert (said["thinking"], said["content"]) == ("I look.\n\nSee.", "")
    assert "thinking" not in other and other["content"] == "See."


def test_tools_have_the_fields_that_templates_go_over() -> None:
    bare = {"function": {"name": "f", "description": None}}
    parameters = {"type": "object", "properties": {}}
    wanted = {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
    assert with_all_fields(bare) == wanted and with_all_fields(TOOL) == TOOL
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
    (call,) = fitted("", [called], [], None)[0]["tool_calls"]
    assert call == {"type": "function", "id": "a", "function": {"arguments": "{}", "name": "f"}}
    template = "{% for t in tools or [] %}{{ '// ' + t.function.description }}\
{% for name in t.function.parameters.properties.keys() %}{{ name }}{% endfor %}{% endfor %}{{ messages[0].content }}"
    with running(f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {shlex.quote(template)}") as client:
        response = client.post("/apply-template", json={"messages": MESSAGES[:1], "tools": [bare, TOOL]})
        assert response.json() == {"prompt": "// // Reads.pathlinesHi"}


def test_control_tokens_inside_of_a_tag() -> None:
    """The opening tag of Gemma 4 is a control token and text; of the model's text only the token would be missing."""
    tokens = ["<unk>", "<s>", "</s>", "<|channel>", "<channel|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, 3, 3, *[6] * 256]
    vocab = Vocab.from_metadata(made("llama", tokens, token_type=kinds, scores=[0.0] * len(tokens)))
    opening, closing = ("<|channel>thought", "<channel|>")
    assert (control_tokens(vocab, opening), control_tokens(vocab, closing)) == ([3], [4])
    mark = marker_rule(vocab)
    assert (mark(opening), mark(closing), mark("<other>")) == ('<[3]> "thought"', "<[4]>", '"<other>"')
    assert mark("é<|channel>ü") == '"é" <[3]> "ü"'
