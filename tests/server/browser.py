"""The web page in a headless Chromium."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import listening, wait_for

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")


by = pytest.importorskip("selenium.webdriver.common.by")


keys = pytest.importorskip("selenium.webdriver.common.keys").Keys


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


DRIVER = shutil.which("chromedriver")


NEEDS_BROWSER = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no Chromium with chromedriver: apt install chromium chromium-driver"
)


OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1100,800",
)  # fmt: skip


HELLO = '{"logit_bias": {"259": 100}}'


ANSWER = """const answer = arguments[0], fetch = window.fetch;
window.fetch = async (path, options) => {
  if (!path.endsWith("completions")) return fetch(path, options);
  window.sent = JSON.parse(options.body);
  return new Response(`data: ${JSON.stringify({choices: [{index: 0, delta: {content: answer}}]})}\\n\\n`);
};"""


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self) -> None:
        self.driver.get(self.address)
        assert wait_for(lambda: self.texts("#status") != [""])

    def find(self, selector: str) -> Any:
        return self.driver.find_element(by.By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector
        )

    def set(self, **settings: str) -> None:
        """Settings through the dialog."""
        self.find("#open").click()
        for name, value in settings.items():
            field = self.find(f"#settings [name={name}]")
            field.clear()
            field.send_keys(value)
        self.find("#settings button[value=close]").click()

    def send(self, text: str) -> None:
        self.find("#input").send_keys(text, keys.ENTER)

    def answer_with(self, text: str) -> None:
        """The page gets this answer to all questions, which are in `window.sent`."""
        self.driver.execute_script(ANSWER, text)

    def click(self, text: str) -> None:
        """Clicks the first button of messages that is called so."""
        found = self.driver.find_elements(by.By.CSS_SELECTOR, ".actions button")
        next(button for button in found if button.text == text).click()

    def idle(self) -> bool:
        return self.find("#send").is_displayed()

    def errors(self) -> list[str]:
        """Errors of this page; the one before may still have asked a server that has ended."""
        found = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in found if message.startswith(self.address)]


@contextlib.contextmanager
def started_driver(profile: Path) -> Iterator[Any]:
    """A browser with a profile in a folder of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def new_page(driver: Any, client: httpx.Client) -> Page:
    """The page as a browser shows it that was never there."""
    page = Page(driver, str(client.base_url))
    page.open()
    driver.execute_script("localStorage.clear(); sessionStorage.clear()")
    page.open()
    return page


@contextlib.contextmanager
def opened_page(driver: Any) -> Iterator[Page]:
    """The page of a server whose model answers as it is told to; in the end without errors."""
    with listening("llama-server -m PUPPET -t 1 -c 4096 -np 2") as (client, _):
        driver.set_window_size(1100, 800)
        page = new_page(driver, client)
        yield page
        assert page.errors() == []
