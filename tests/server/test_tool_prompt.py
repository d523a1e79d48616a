"""Tools and calls as templates need them: DeepSeek V3, R1 and V3.1 never show the tools, Mistral wants short ids."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN
from ikpy.server.chat.tool_formats import tool_format
from ikpy.server.chat.tool_ids import with_short_ids
from ikpy.server.chat.tool_prompt import tools_text, with_tools
from ikpy.vocab import ChatTemplate
from tests.server.harness import running

CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments }}\n```"
    "<｜tool▁call▁end｜>"
)
# As in the models' own: calls count only where content is null, and the variable of the tools does not occur.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}"
    "{% elif m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    f"{{% for c in m.tool_calls %}}{CALL}{{% endfor %}}"
    "<｜tool▁calls▁end｜>{% else %}<｜Assistant｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% if thinking %}<think>{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]},
    },
}
USER = {"role": "user", "content": "Hi"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    template = shlex.quote(TEMPLATE)
    with running(f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {template}") as client:
        yield client


def prompt(client: TestClient, **body: object) -> str:
    response = client.post("/apply-template", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


def test_formats_are_found_without_the_variable_of_the_tools() -> None:
    assert tool_format(TEMPLATE) is DEEPSEEK
    assert tool_format(TEMPLATE.replace("```json", "")) is DEEPSEEK_PLAIN


@pytest.mark.parametrize("format_", [DEEPSEEK, DEEPSEEK_PLAIN])
def test_the_form_that_is_shown_is_the_one_that_is_read(format_: object) -> None:
    shown = format_.example.replace("NAME", "f").replace("ARGUMENTS", '{"a": 1}')  # type: ignore[attr-defined]
    assert shown in tools_text([TOOL], format_).replace("NAME", "f").replace("ARGUMENTS", '{"a": 1}')  # type: ignore[arg-type]
    reader = format_.reader()  # type: ignore[attr-defined]
    parts = list(reader.feed(shown.removeprefix(format_.opening), True))  # type: ignore[attr-defined]
    assert [(part.name, json.loads(part.arguments)) for part in parts] == [("f", {"a": 1})]


def test_tools_stand_in_the_system_message(client: TestClient) -> None:
    text = prompt(client, messages=[{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert text.startswith("Be brief.\n\n## Tools\n")
    assert "### read_file\nDescription: Reads a file.\n" in text and DEEPSEEK.example in text
    assert json.loads(text.partition("Parameters: ")[2].partition("\n")[0]) == TOOL["function"]["parameters"]  # type: ignore[index]
    assert text.endswith("<｜User｜>Hi<｜Assistant｜>")
    without_system = prompt(client, messages=[USER], tools=[TOOL])
    assert without_system == text.removeprefix("Be brief.\n\n")
    assert prompt(client, messages=[USER], tools=[TOOL], tool_choice="none") == "<｜User｜>Hi<｜Assistant｜>"


def test_tools_behind_a_system_message_of_parts() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    told = with_tools([system, USER], [TOOL], DEEPSEEK)
    text = ChatTemplate(TEMPLATE).render(told)
    assert text.startswith("Be brief.\n\n## Tools\n")


def test_a_forced_call_is_read(client: TestClient) -> None:
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 600, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "read_file" and json.loads(call["function"]["arguments"])["path"] in ("a", "b")


def test_enable_thinking_reaches_templates_that_call_it_thinking(client: TestClient) -> None:
    for value in (True, False):
        text = prompt(client, messages=[USER], chat_template_kwargs={"enable_thinking": value})
        assert text.endswith("<think>") is value
    both = {"enable_thinking": False, "thinking": True}
    assert prompt(client, messages=[USER], chat_template_kwargs=both).endswith("<think>")


@pytest.mark.parametrize("content", [None, "", [], "Let me see."])
def test_calls_of_the_conversation_are_written(content: object) -> None:
    template = ChatTemplate(TEMPLATE)
    assistant = {"role": "assistant", "content": content, "tool_calls": CALLS}
    text = template.render([USER, assistant, {"role": "tool", "tool_call_id": "c1", "content": "x"}])
    call = 'function<｜tool▁sep｜>read_file\n```json\n{"path": "a"}'
    written = f"<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}"
    said = f"<｜Assistant｜>{content}" if content else ""
    assert text.startswith(f"<｜User｜>Hi{said}{written}")


MISTRAL_TEMPLATE = """{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}\
{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception("IDs have length 9!") }}{% endif %}{{ c.id }} \
{% endfor %}{% elif m.role == "tool" %}{{ m.tool_call_id }} {% else %}{{ m.content }} {% endif %}{% endfor %}\
{{ tools }}"""


def test_templates_that_want_short_ids_get_them(tmp_path: Path) -> None:
    """Ids of this server's answers have 32 characters, those of other clients any number."""
    file = tmp_path / "mistral.jinja"
    file.write_text(MISTRAL_TEMPLATE)
    with running(f"llama-server -m PUPPET -t 1 -c 256 -np 1 --chat-template-file {file}") as client:
        ids = ("a" * 32, "call_1", "a1B2c3D4e")
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
        results = [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ids]
        body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]}
        response = client.post("/apply-template", json=body)
        assert response.status_code == 200, response.text
        _, *shown = response.json()["prompt"].removesuffix("None").split()
        assert shown[:3] == shown[3:] and len(set(shown)) == 3 and shown[2] == ids[2]
        assert all(len(text) == 9 and text.isalnum() for text in shown)


def test_calls_without_ids_get_some_where_a_template_asks_for_them() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, {"function": {"name": "g"}}]},
        {"role": "tool", "content": "1", "tool_call_id": None},
        {"role": "tool", "content": "2"},
    ]
    for check in ("call.id|length != 9", "call.id|length < 9"):
        found = with_short_ids("{{ " + check + " }}", messages)
        ids = [c["id"] for c in found[0]["tool_calls"]]
        assert [m["tool_call_id"] for m in found[1:]] == ids and all(len(i) == 9 for i in ids) and ids[0] != ids[1]
    assert with_short_ids("{{ call.id }}", messages) == messages and call["id"] is None
