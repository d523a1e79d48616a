"""The web page in a headless Chromium; skipped with a reason where there is none.

IKPY_SCREENSHOT=docs/server-page.png keeps the picture of the documentation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import HELLO, NEEDS_BROWSER, Page, by, keys, new_page, opened_page, started_driver
from tests.server.live import listening, wait_for

ENDLESS = '{"logit_bias": {"449": 100}, "max_tokens": 1000000000}'


MARKDOWN = """# Title

Some **bold**, *italic* and `code <b>`.

- one
- two
  1. inner

| a | b |
|---|---|
| 1 | 2 |

```python
print("<script>")
```
> quoted

[good](https://example.com) [bad](javascript:alert(1)) <img src=x onerror=alert(1)>"""


STEPS = """Steps:
1. Do ***this***:

   ```python
   a

   b
   ```
2. See https://a.example/x.
| t |
|---|
| \\*1\\* |"""


pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module", name="driver")
def start_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started_driver(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(name="page")
def open_page(driver: Any) -> Iterator[Page]:
    with opened_page(driver) as page:
        yield page


def test_type_stream_and_reload(page: Page) -> None:
    page.set(extra=HELLO, temperature="0")
    page.send("Hi there")
    assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
    assert page.texts(".message.user > span") == ["Hi there"]
    assert "tokens/s" in page.texts(".message .rate")[0] and "context" in page.texts(".message .rate")[0]
    page.open()
    assert page.texts(".message .text") == ["Hello world."], "a reload keeps the conversation"
    assert page.texts("#chats .title") == ["Hi there"]
    page.find("#open").click()
    assert page.find("[name=temperature]").get_attribute("value") == "0"
    assert wait_for(lambda: "slot 1: idle" in page.find("#info").text)
    assert "puppet" in page.find("#info").text.lower()
    page.find("#defaults").click()
    assert page.find("[name=temperature]").get_attribute("value") == ""
    assert wait_for(lambda: page.find("[name=temperature]").get_attribute("placeholder") == "0.8")
    page.find("#settings").send_keys(keys.ESCAPE)
    assert wait_for(lambda: page.find("#status").text == "0 of 2 slots busy")


def test_stop_regenerate_continue_and_edit(page: Page) -> None:
    page.set(extra=ENDLESS)
    page.send("Go on")
    assert wait_for(lambda: len(page.texts(".message .text")[-1:]) == 1 and len(page.texts(".message .text")[0]) > 50)
    assert page.find("#stop").is_displayed()
    page.find("#stop").click()
    assert wait_for(page.idle)
    stopped = page.texts(".message .text")[0]
    time.sleep(0.2)
    assert page.texts(".message .text")[0] == stopped, "nothing comes after a stop"
    page.set(extra=HELLO)
    page.click("Regenerate")
    assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
    page.click("Edit")
    assert page.find("#input").get_attribute("value") == "Go on"
    assert page.texts(".message") == []


def test_an_edit_can_be_given_up(page: Page) -> None:
    page.answer_with("Answer")
    for text in ("One", "Two"):
        page.send(text)
        assert wait_for(page.idle)
    page.click("Edit")
    assert page.texts(".message") == []
    page.find("#input").send_keys(keys.ESCAPE)
    assert page.texts(".message.user > span") == ["One", "Two"] and page.find("#input").get_attribute("value") == ""
    page.click("Edit")
    page.open()
    assert page.texts(".message.user > span") == ["One", "Two"], "nothing was sent"
    page.answer_with("Answer")
    page.click("Edit")
    page.send(" and a half")
    assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Answer"])
    page.open()
    assert page.texts(".message.user > span") == ["One and a half"] == page.texts("#chats .title")


def test_keyboard(page: Page) -> None:
    page.set(extra=ENDLESS)
    field = page.find("#input")
    field.send_keys("first line", keys.SHIFT + keys.ENTER, keys.NULL + "second line")
    assert "\n" in field.get_attribute("value")
    field.send_keys(keys.ENTER)
    assert wait_for(lambda: page.find("#stop").is_displayed())
    field.send_keys(keys.ESCAPE)
    assert wait_for(page.idle), "Escape stops"
    assert wait_for(lambda: page.driver.execute_script("return document.activeElement.id") == "input")
    field.send_keys(keys.ALT + "n")
    assert wait_for(lambda: page.texts(".message") == []), "Alt+N begins a new conversation"
    assert len(page.texts("#chats .title")) == 1
    page.find("#input").send_keys(keys.ALT + "s")
    assert wait_for(lambda: page.find("#settings").is_displayed())
    page.find("#settings").send_keys(keys.ESCAPE)
    assert wait_for(lambda: not page.find("#settings").is_displayed())


def test_conversations_can_be_switched_and_deleted(page: Page) -> None:
    page.set(extra=HELLO)
    for text in ("One", "Two"):
        page.find("#new").click()
        page.send(text)
        assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
    assert page.texts("#chats .title") == ["Two", "One"]
    page.driver.find_elements(by.By.CSS_SELECTOR, "#chats .title")[1].click()
    assert page.texts(".message.user > span") == ["One"]
    page.driver.find_elements(by.By.CSS_SELECTOR, "#chats .remove")[1].click()
    assert page.texts("#chats .title") == ["Two"] and page.texts(".message") == []


def test_markdown_is_shown_and_never_becomes_html(page: Page) -> None:
    chat = {"id": 1, "title": "Markdown", "messages": [
        {"role": "user", "content": "Show <b>all</b>"}, {"role": "assistant", "content": MARKDOWN, "rate": "12 tokens"},
    ]}  # fmt: skip
    page.driver.execute_script("localStorage.setItem('ikpy.chats', JSON.stringify([arguments[0]]))", chat)
    page.open()
    for selector, wanted in (
        (".text h1", "Title"), (".text strong", "bold"), (".text em", "italic"), (".text p code", "code <b>"),
        (".text pre code", 'print("<script>")'), (".text td", "1"), (".text blockquote", "quoted"), (".text a", "good"),
        (".message.user > span", "Show <b>all</b>"),
    ):  # fmt: skip
        assert page.texts(selector)[:1] == [wanted], selector
    assert len(page.texts(".text > ul > li")) == 2 and len(page.texts(".text ol li")) == 1
    assert page.texts(".text a") == ["good"], "a script is no address"
    assert page.texts(".text img") == [] and page.texts(".text b") == []


def test_lists_hold_code_and_end_before_tables(page: Page) -> None:
    page.answer_with(STEPS)
    page.send("How?")
    assert wait_for(lambda: page.idle() and page.texts(".text ol pre code") == ["a\n\nb"])
    assert len(page.texts(".text > ol > li")) == 2
    assert page.texts(".text strong em") == ["this"] and page.texts(".text a") == ["https://a.example/x"]
    assert page.texts(".text td") == ["*1*"]


@pytest.mark.parametrize("line", [">" * 5000, "+ " * 5000 + "a", "> - " * 3000])
def test_a_model_in_a_loop_does_not_end_the_page(page: Page, line: str) -> None:
    page.answer_with(line)
    page.send("Hi")
    assert wait_for(lambda: page.idle() and page.texts(".message .text") != [])
    page.open()
    assert page.texts("#chats .title") == ["Hi"]


def test_what_is_open_while_an_answer_comes_is_kept(page: Page) -> None:
    page.set(extra=ENDLESS)
    page.send("Go on")
    assert wait_for(lambda: len("".join(page.texts(".message .text"))) > 50)
    page.find("#open").click()
    page.find("#settings").send_keys(keys.ESCAPE)
    assert wait_for(lambda: not page.find("#settings").is_displayed())
    assert page.find("#stop").is_displayed(), "Escape closed the settings and nothing else"
    page.open()
    assert page.texts(".message.user > span") == ["Go on"]
    assert len(page.texts(".message .text")[0]) > 50, "a reload keeps what came"
    assert page.texts(".actions button") == ["Edit", "Regenerate", "Continue", "Copy"]


def test_the_end_of_an_answer_does_not_move_the_view(page: Page) -> None:
    page.set(extra=ENDLESS)
    page.send("Go on")
    height = "return document.querySelector('#scroll').scrollHeight - document.querySelector('#scroll').clientHeight"
    assert wait_for(lambda: page.driver.execute_script(height) > 300)
    page.driver.execute_script("document.querySelector('#scroll').scrollTop = 10")
    page.find("#stop").click()
    assert wait_for(page.idle)
    assert page.driver.execute_script("return document.querySelector('#scroll').scrollTop") == 10


def test_settings_close_with_any_number_and_without_what_is_no_json(page: Page) -> None:
    page.set(temperature="0.333", min_p="0.001")
    assert not page.find("#settings").is_displayed()
    for wrong in ("{bad", "[1]"):
        page.set(extra=wrong)
        assert page.find("#settings").is_displayed(), "the field says what is wrong"
        page.find("#settings").send_keys(keys.ESCAPE)
        page.set(top_k="3")
        assert not page.find("#settings").is_displayed(), "what was given up is not checked again"
    kept = page.driver.execute_script("return JSON.parse(localStorage['ikpy.settings'])")
    assert kept == {"temperature": "0.333", "min_p": "0.001", "top_k": "3"}


def test_tabs_keep_each_others_conversations(page: Page) -> None:
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    second = page.driver.current_window_handle
    try:
        page.open()
        for tab, text in ((first, "One"), (second, "Two"), (first, "Three")):
            page.driver.switch_to.window(tab)
            page.set(extra=HELLO)
            page.find("#new").click()
            page.send(text)
            assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
        page.open()
        assert page.texts("#chats .title") == ["Three", "Two", "One"]
    finally:
        page.driver.switch_to.window(second)
        page.driver.close()
        page.driver.switch_to.window(first)


def test_copying_where_the_browser_has_no_clipboard_for_pages(page: Page) -> None:
    page.driver.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.answer_with("copied text")
    page.send("Hi")
    assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["copied text"])
    page.click("Copy")
    page.find("#input").send_keys(keys.CONTROL, "v")
    assert page.find("#input").get_attribute("value") == "copied text"


def test_questions_without_an_answer_are_sent_as_one(page: Page) -> None:
    page.answer_with("")
    for text in ("One", "Two"):
        page.send(text)
        assert wait_for(page.idle)
    sent = page.driver.execute_script("return window.sent.messages")
    assert sent == [{"role": "user", "content": "One\n\nTwo"}]


def test_a_conversation_with_a_model(driver: Any) -> None:
    with listening("llama-server -m MODEL -t 1 -c 2048 -np 2 --alias tiny-mla-moe") as (client, _):
        page = new_page(driver, client)
        page.set(temperature="0", max_tokens="60")
        for n, question in enumerate(("The old man looked at the sea", "And the girl?"), 1):
            page.send(question)
            assert wait_for(lambda n=n: page.idle() and len(page.texts(".message .rate")) == n)  # type: ignore[misc]
        answers = page.texts(".message .text")
        assert len(answers) == 2 and all(answers)
        assert all("60 tokens" in rate for rate in page.texts(".message .rate"))
        assert page.errors() == []
        picture = os.environ.get("IKPY_SCREENSHOT")
        if picture:
            driver.save_screenshot(str(Path(picture).resolve()))


def test_on_a_phone(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        page.open()
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert wait_for(lambda: not page.find("#side").is_displayed() or page.find("#side").rect["x"] < 0)
        page.find("#menu").click()
        assert wait_for(lambda: page.find("#new").is_displayed() and page.find("#side").rect["x"] >= 0)
        page.find("#new").click()
        assert wait_for(lambda: page.find("#side").rect["x"] < 0)
        page.send("Hi")
        assert wait_for(lambda: page.texts(".message.user > span") == ["Hi"])
        page.find("#input").send_keys(keys.ESCAPE)
        assert wait_for(page.idle)
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
