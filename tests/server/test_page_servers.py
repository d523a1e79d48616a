"""The web page beside servers of several kinds: errors, keys, models, pictures, sounds; skipped without a Chromium."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.picture_models import png, write_projector, write_text
from tests.server.browser import HELLO, NEEDS_BROWSER, Page, keys, new_page, opened_page, started_driver
from tests.server.harness import MODELS
from tests.server.live import listening, wait_for
from tests.server.picture_requests import start
from tests.server.test_router import router
from tests.sound_models import tone, wav, write_hearing_model

pytestmark = NEEDS_BROWSER
MEDIA = "/files.js", "/media.js", "/pictures.js", "/sounds.js"


@pytest.fixture(scope="module", name="driver")
def start_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started_driver(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(name="page")
def open_page(driver: Any) -> Iterator[Page]:
    with opened_page(driver) as page:
        yield page


def test_the_command_line_says_what_holds_for_empty_fields(driver: Any) -> None:
    with listening("llama-server -m MODEL -t 1 -c 512 -np 1 --temp 0 --top-k 3 -n 7") as (client, _):
        page = new_page(driver, client)
        page.find("#open").click()
        for name, shown in (
            ("temperature", "0"),
            ("top_k", "3"),
            ("max_tokens", "7"),
            ("seed", "-1"),
            ("min_p", "0.05"),
        ):
            field = page.find(f"[name={name}]")
            assert wait_for(lambda f=field, s=shown: f.get_attribute("placeholder") == s), name  # type: ignore[misc]
        page.find("#settings").send_keys(keys.ESCAPE)
        page.send("The old man looked at the sea")
        assert wait_for(lambda: page.idle() and any("7 tokens," in rate for rate in page.texts(".message .rate")))
        asked = client.get("/slots").json()[0]
        assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.0, 3, -1)
        page.set(max_tokens="3", top_k="5")
        page.set(top_k="")
        page.send("Again")
        assert wait_for(lambda: page.idle() and any("3 tokens," in rate for rate in page.texts(".message .rate")))
        assert client.get("/slots").json()[0]["top_k"] == 3
        assert page.errors() == []


def test_errors_and_keys(driver: Any) -> None:
    with listening("llama-server -m PUPPET -t 1 -c 512 -np 1 --api-key secret") as (client, _):
        page = new_page(driver, client)
        page.send("Hi")
        assert wait_for(lambda: page.texts(".message.error div:not(.actions):not(.text)") == ["Invalid API Key"])
        page.find("#open").click()
        assert wait_for(lambda: page.find("#info").text == "Invalid API Key")
        page.find("[name=key]").send_keys("secret", keys.TAB)
        assert wait_for(lambda: "1 slots" in page.find("#info").text)
        page.find("#settings").send_keys(keys.ESCAPE)
        page.set(extra=HELLO)
        page.click("Regenerate")
        assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
        stored = driver.execute_script("return JSON.stringify(localStorage)")
        assert "secret" not in stored, "keys stay in the session"
        page.errors()


def test_choice_of_a_model(driver: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").symlink_to(MODELS["PUPPET"])
    with router(tmp_path) as (client, _):
        page = new_page(driver, client)
        assert wait_for(lambda: page.texts("#model option") == ["one", "two"])
        page.find("#model").send_keys("two")
        page.set(extra=HELLO)
        page.send("Hi")
        assert wait_for(lambda: page.idle() and page.texts(".message .text") == ["Hello world."])
        states = {entry["id"]: entry["status"]["value"] for entry in client.get("/v1/models").json()["data"]}
        assert states == {"one": "unloaded", "two": "loaded"}
        page.find("#open").click()
        assert wait_for(lambda: "two.gguf" in page.find("#info").text), "settings describe the chosen model"
        page.find("#settings").send_keys(keys.ESCAPE)
        assert wait_for(lambda: page.texts("#status") == ["1 model loaded"])
        assert page.errors() == []


def test_pictures(driver: Any, tmp_path: Path) -> None:
    """They are shown, sent in front of the text, kept over a reload, and with a message that is edited."""
    write_text(tmp_path / "text.gguf")
    write_projector(tmp_path / "mmproj.gguf")
    (tmp_path / "a.png").write_bytes(png(1))
    Image.effect_noise((2500, 700), 90).save(tmp_path / "large.png")
    with listening(start(tmp_path)) as (client, _):
        page = new_page(driver, client)
        assert wait_for(lambda: page.find("#attach").is_displayed())
        page.find("#files").send_keys(f"{tmp_path / 'a.png'}\n{tmp_path / 'large.png'}")
        assert wait_for(lambda: len(page.texts("#attached button")) == 2)
        page.set(max_tokens="4", temperature="0")
        page.send("what")
        assert wait_for(lambda: page.idle() and page.texts(".message .rate") != [])
        assert page.texts("#attached button") == [] and len(page.texts(".message.user img")) == 2
        page.open()
        assert wait_for(lambda: len(page.texts(".message.user img")) == 2)
        page.click("Edit")
        page.find("#attached button").click()
        page.answer_with("yes")
        page.send("ever")
        assert wait_for(lambda: page.texts(".message .text") == ["yes"])
        picture, text = page.driver.execute_script("return window.sent.messages[0].content")
        assert text == {"type": "text", "text": "whatever"}
        address = picture["image_url"]["url"]
        assert address.startswith("data:image/jpeg;base64,"), "the large one became a JPEG"
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
            assert image.size == (2048, 573)
        page.set(extra="{}")
        page.send("more")
        assert wait_for(lambda: len(page.texts(".message .text")) == 2)
        assert [m["role"] for m in page.driver.execute_script("return window.sent.messages")][-1] == "user"
        assert page.errors() == []


def test_sounds(driver: Any, tmp_path: Path) -> None:
    """They can be heard, and are sent in front of the text: as they are, or as WAV of what encoders hear."""
    write_hearing_model(tmp_path)
    (tmp_path / "a.wav").write_bytes(wav(tone(0.5, 1)))
    t = np.arange(8 * 48000) / 48000
    both = np.stack([0.6 * np.sin(2 * np.pi * 440 * t), 0.2 * np.sin(2 * np.pi * 440 * t)], 1)
    (tmp_path / "large.wav").write_bytes(wav(both, 48000))
    (tmp_path / "bad.ogg").write_bytes(b"OggS and nothing else")
    with listening(start(tmp_path)) as (client, _):
        page = new_page(driver, client)
        assert wait_for(lambda: page.find("#attach").is_displayed())
        assert page.find("#files").get_attribute("accept") == "audio/*", "the model sees no pictures"
        page.find("#files").send_keys("\n".join(str(tmp_path / name) for name in ("a.wav", "large.wav", "bad.ogg")))
        assert wait_for(lambda: page.texts("#status") == ["bad.ogg is no sound that this browser can read"])
        assert page.texts("#attached button") == ["♪ sound", "♪ sound"]
        page.set(max_tokens="4", temperature="0")
        page.send("what")
        assert wait_for(lambda: page.idle() and page.texts(".message .rate") != [])
        assert page.texts("#attached button") == []
        length = "return [...document.querySelectorAll('.message.user audio')].map(node => node.duration ?? 0)"
        assert wait_for(lambda: np.allclose(driver.execute_script(length) or [0], [0.5, 8]), 20)
        page.answer_with("yes")
        page.click("Regenerate")
        assert wait_for(lambda: page.texts(".message .text") == ["yes"])
        first, second, text = driver.execute_script("return window.sent.messages[0].content")
        assert text == {"type": "text", "text": "what"}
        assert base64.b64decode(first["input_audio"]["data"]) == (tmp_path / "a.wav").read_bytes()
        assert [part["input_audio"]["format"] for part in (first, second)] == ["wav", "wav"]
        with wave.open(io.BytesIO(base64.b64decode(second["input_audio"]["data"]))) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
            samples = np.frombuffer(file.readframes(1 << 20), "<i2") / 32767
        wanted = 0.4 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 16000)
        inside = slice(1600, -1600)  # the ends are the resampler's own
        assert len(samples) == 8 * 16000 and np.abs(samples - wanted)[inside].max() < 2e-3
        assert page.errors() == []


def test_no_pictures_and_sounds_without_a_projector(page: Page) -> None:
    assert not page.find("#attach").is_displayed()


def test_nothing_comes_from_elsewhere() -> None:
    with listening("llama-server -m PUPPET -t 1 -c 512 -np 1") as (client, _):
        for path in ("/", "/page.js", "/page.css", "/markdown.js", "/clipboard.js", *MEDIA):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "http://" not in answer.text and "https://" not in answer.text
