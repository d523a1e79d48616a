"""Requests with sound: every API that has a place for it, transcription, and what is refused."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy import LLM
from ikpy.server import media
from ikpy.server.build import Server
from ikpy.server.errors import ApiError
from ikpy.server.form import read_form
from ikpy.tools.media_marks import MARKER
from ikpy.tools.media_tokens import NO_MEDIA
from ikpy.tools.sounds import Sound
from tests.cpu.media.sound_kinds import TOWERS
from tests.picture_models import data_uri, png, write_projector, write_text
from tests.server.harness import read_events
from tests.server.live import wait_for
from tests.server.picture_requests import asked, logprobs, refused, said, start, text
from tests.server.test_router import router
from tests.sound_models import tone, wav, write_hearing_model, write_sound_projector

Json = dict[str, Any]
LENGTH = {"max_tokens": 6, "temperature": 0}
HEARD = wav(tone(1.5, 1))
ROWS = 48


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    write_hearing_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    started = start(files)
    yield started
    started.engine.stop(10)


@pytest.fixture(scope="module")
def client(server: Server) -> TestClient:
    return TestClient(server.app, raise_server_exceptions=False)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def sound(data: bytes = HEARD, **more: Any) -> Json:
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": "wav"} | more}


def chat(client: TestClient, *parts: Json, **more: Any) -> Json:
    response = client.post("/v1/chat/completions", json=asked(*parts, **more))
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_are_those_of_rows_put_together_by_hand(client: TestClient, files: Path) -> None:
    """Log-probabilities beside those of the Python API, which opens the projector and counts the tokens itself."""
    llm = LLM(files / "text.gguf", mmproj=files / "mmproj.gguf", n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
    found = chat(client, text("whatis"), sound(), logprobs=True)
    prompt = "<start_of_turn>user\nwhatis"
    tokens = llm._tokens_of([prompt, Sound.of_file(HEARD), "<end_of_turn>\n<start_of_turn>model\n"])
    assert found["usage"]["prompt_tokens"] == len(tokens)
    assert sum(token >= llm.model.hparams.n_vocab for token in tokens) == ROWS
    llm._sequence.rewind(tokens)
    logits = np.asarray(llm._sequence.feed(tokens), np.float64)
    first = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert abs(logprobs(found)[0] - first) < 1e-4
    assert said(found) == llm.chat(
        [{"role": "user", "content": [{"type": "text", "text": "whatis"}, {"type": "audio", "audio": HEARD}]}],
        max_tokens=6,
        temperature=0,
    )


def test_sounds_are_told_apart_and_remembered(client: TestClient) -> None:
    first = chat(client, text("whatis"), sound(), logprobs=True)
    other = chat(client, text("whatis"), sound(wav(tone(1.5, 2))), logprobs=True)
    assert np.abs(logprobs(first) - logprobs(other)).max() > 1e-3
    again = chat(client, text("whatis"), sound(), logprobs=True)
    assert np.abs(logprobs(first) - logprobs(again)).max() < 1e-5
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > ROWS


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": base64_of(HEARD)}},
        {"type": "input_audio", "input_audio": {"data": data_uri(HEARD, "audio/wav")}},
        {"type": "input_audio", "input_audio": {"url": data_uri(HEARD, "audio/mpeg")}},
        {"type": "input_audio", "input_audio": base64_of(HEARD)},
    ],
)
def test_places_of_a_sound(client: TestClient, part: Json) -> None:
    assert said(chat(client, text("whatis"), part)) == said(chat(client, text("whatis"), sound()))


def test_other_routes(client: TestClient) -> None:
    want = said(chat(client, text("whatis"), sound()))
    body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "whatis"}, sound()]}]}
    found = client.post("/v1/responses", json=body | {"max_output_tokens": 6, "temperature": 0}).json()
    assert found["output"][0]["content"][0]["text"] == want
    prompt = {
        "prompt_string": f"<start_of_turn>user\nwhatis{MARKER}<end_of_turn>\n<start_of_turn>model\n",
        "multimodal_data": [base64_of(HEARD)],
    }
    found = client.post("/completion", json={"prompt": prompt, "n_predict": 6, "temperature": 0}).json()
    assert found["content"] == want
    rendered = client.post("/apply-template", json=asked(text("whatis"), sound())).json()["prompt"]
    assert rendered.count(MARKER) == 1


def test_what_the_server_says_of_itself(client: TestClient) -> None:
    assert client.get("/props").json()["modalities"] == {"vision": False, "video": False, "audio": True}
    entry = client.get("/v1/models").json()["data"][0]
    assert entry["architecture"] == {"input_modalities": ["text", "audio"], "output_modalities": ["text"]}
    assert "audio" in client.post("/api/show", json={}).json()["capabilities"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            sound(b"hello, this is no sound"),
            "Failed to load image or audio file: it is no picture or sound of a known format",
        ),
        (sound(HEARD[:30]), "Failed to load image or audio file: audio"),
        (sound(b"fLaC" + bytes(50)), "Failed to load image or audio file: audio cannot be decoded"),
        (sound(b"ID3" + bytes(50)), "Failed to load image or audio file: audio cannot be decoded"),
        (sound(b"!"), "Invalid base64 value"),
        ({"type": "input_audio", "input_audio": {"data": "!!!"}}, "Invalid base64 value"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' must be an object with a string 'data'"),
        ({"type": "input_audio"}, "'input_audio' must be an object with a string 'data'"),
        ({"type": "input_audio", "input_audio": {"data": 5}}, "'input_audio' must be an object with a string 'data'"),
        ({"type": "input_audio", "input_audio": {"data": data_uri(HEARD, "text/plain")}}, "Invalid uri format"),
        ({"type": "image_url", "image_url": {"url": data_uri(png(1))}}, NO_MEDIA.format("image")),
        (sound(png(1)), NO_MEDIA.format("image")),
        ({"type": "input_video", "input_video": {}}, NO_MEDIA.format("video")),
    ],
)
def test_sounds_that_cannot_be_used(client: TestClient, part: Json, message: str) -> None:
    if part == sound(b"!"):
        part["input_audio"]["data"] = "!"
    assert refused(client.post("/v1/chat/completions", json=asked(text("x"), part))).startswith(message)


def test_sounds_of_a_request_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [sound(wav(tone(1, i))) for i in range(3)]
    want = said(chat(client, *parts))
    monkeypatch.setattr(media, "KEPT_BYTES", 70000)  # others are decoded twice
    assert said(chat(client, *parts)) == want
    monkeypatch.setattr(media, "MOST_SECONDS", 2)
    message = refused(client.post("/v1/chat/completions", json=asked(*parts)))
    assert message == "the sounds are longer than 2 seconds together"


class SlowEncoder:
    """Counts the pieces that it gives, each after a while."""

    def __init__(self, encoder: Any, server: Server) -> None:
        self._encoder, self._server = encoder, server
        self.counts: list[int] = []
        """Tokens of running answers before each piece."""

    def n_rows(self, n_samples: int) -> int:
        return self._encoder.n_rows(n_samples)

    def encoded(self, samples: Any) -> Iterator[Any]:
        for piece in self._encoder.encoded(samples):
            self.counts.append(sum(slot.n_decoded for slot in self._server.engine.slots))
            time.sleep(0.1)
            yield piece


def test_answers_go_on_between_pieces_of_a_sound(files: Path) -> None:
    """Sounds of several requests are encoded once, and not on when nobody waits for them."""
    server = start(files, "-np", "4", "-c", "16384")
    reader = server.front.media
    assert reader is not None
    slow = reader._sounds = SlowEncoder(reader._sounds, server)
    long = sound(wav(tone(70, 3)))
    with TestClient(server.app) as client, ThreadPoolExecutor(3) as pool:
        running = pool.submit(chat, client, text("hello"), max_tokens=3000, ignore_eos=True)
        assert wait_for(lambda: any(slot.n_decoded > 3 for slot in server.engine.slots))
        first, second = pool.map(lambda _: said(chat(client, text("x"), long)), range(2))
        assert first == second and said(running.result())
        assert len(slow.counts) == 3 and slow.counts[0] < slow.counts[1] < slow.counts[2]
        parts: list[Any] = ["x", base64.b64decode(sound(wav(tone(100, 4)))["input_audio"]["data"])]
        assert server.front._look(reader, parts, lambda: len(slow.counts) == 5)[0] == []
        assert len(slow.counts) == 5
    server.engine.stop(10)


def test_sounds_that_cannot_fit_are_not_encoded(files: Path) -> None:
    """Their tokens are known from their length; routes that count them encode them all the same."""
    server = start(files, "-c", "256")
    reader = server.front.media
    assert reader is not None
    slow = reader._sounds = SlowEncoder(reader._sounds, server)
    long, short = (sound(wav(tone(seconds, 3))) for seconds in (170, 1))
    with TestClient(server.app, raise_server_exceptions=False) as client:
        native = {"prompt_string": f"x{MARKER}", "multimodal_data": [long["input_audio"]["data"]]}
        for route, body in (("/v1/chat/completions", asked(text("x"), long)), ("/completion", {"prompt": native})):
            response = client.post(route, json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert "exceeds the available context size" in error["message"]
            assert error["n_ctx"] == 256 and 6 * ROWS < error["n_prompt_tokens"] < 7 * ROWS
        assert slow.counts == []
        assert said(chat(client, text("x"), short)) and len(slow.counts) == 1
        body = asked(text("x"), long)
        counted = client.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
        assert counted > 6 * ROWS and len(slow.counts) == 7
        # What was seen is known with the text around it.
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["n_prompt_tokens"] == counted and len(slow.counts) == 7
    server.engine.stop(10)


def test_projectors_of_the_other_kind(tmp_path: Path, client: TestClient) -> None:
    """A projector of pictures, and none, with sounds."""
    write_text(tmp_path / "text.gguf")
    write_projector(tmp_path / "mmproj.gguf")
    for mmproj in (True, False):
        started = start(tmp_path, mmproj=mmproj)
        try:
            deaf = TestClient(started.app, raise_server_exceptions=False)
            body = asked(text("x"), sound())
            assert refused(deaf.post("/v1/chat/completions", json=body)) == NO_MEDIA.format("audio")
            assert deaf.get("/props").json()["modalities"]["audio"] is False
        finally:
            started.engine.stop(10)


# transcription


def transcribed(client: TestClient, path: str = "/v1/audio/transcriptions", **fields: str) -> Any:
    form = {"model": "any", "temperature": "0", "max_tokens": "6"} | fields
    return client.post(path, data=form, files={"file": ("speech.wav", HEARD, "audio/wav")})


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "Transcribe audio to text"),
        ({"language": "de"}, "Transcribe audio to text (language: de)"),
        ({"prompt": "what is it", "response_format": "json"}, "what is it"),
    ],
)
def test_transcription(client: TestClient, fields: dict[str, str], prompt: str) -> None:
    answer = chat(client, text(prompt), sound())
    for path in ("/v1/audio/transcriptions", "/audio/transcriptions"):
        found = transcribed(client, path, **fields).json()
        assert found["type"] == "transcript.text.done" and found["text"] == said(answer)
        usage = found["usage"]
        assert usage["input_tokens"] == answer["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["type"] == "tokens"


def test_transcription_as_text(client: TestClient) -> None:
    response = transcribed(client, response_format="text")
    assert response.headers["content-type"].startswith("text/plain")
    assert response.text == transcribed(client, response_format="").json()["text"] + "\n"


@pytest.mark.parametrize("stream", ["true", "True"])
def test_streamed_transcription(client: TestClient, stream: str) -> None:
    whole = transcribed(client).json()
    response = transcribed(client, stream=stream, chunking_strategy="auto", user="me")
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = [event["data"] for event in read_events(response.text)]
    assert [event["type"] for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert "".join(event["delta"] for event in events[:-1]) == whole["text"] == events[-1]["text"]
    assert last == "[DONE]" and events[-1]["type"] == "transcript.text.done"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "verbose_json"}, "Only 'json' and 'text' response_format are supported"),
        ({"temperature": "warm"}, "field 'temperature' is no number, true or false"),
    ],
)
def test_wrong_fields_of_transcriptions(client: TestClient, fields: dict[str, str], message: str) -> None:
    assert message in refused(transcribed(client, **fields))


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/json", b"{}", "must be a form"),
        ("multipart/form-data", b"", "must be a form"),
        ("multipart/form-data; boundary=x", b"", "no whole form"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nfile\r\n", "no whole form"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nfile\r\n--x--", "has no name"),
        ("multipart/form-data; boundary=x", b"--x\r\nA: b\r\n\r\nfile\r\n--x--", "has no name"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n',
            "No input file found for transcription",
        ),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 200 + b"--x--", "no whole form"),
    ],
)
def test_wrong_forms(client: TestClient, content_type: str, body: bytes, message: str) -> None:
    response = client.post("/v1/audio/transcriptions", content=body, headers={"content-type": content_type})
    assert message in refused(response)


@pytest.mark.parametrize("more", [b"; a=b" * 200_000, b';"' * 500_000, b'; a="' + b";" * 1_000_000])
def test_heads_of_forms_have_a_length(more: bytes) -> None:
    """Reading them would take minutes, in which no other thread of the server gets a turn."""
    head = b'Content-Disposition: form-data; name="file"' + more
    began = time.perf_counter()
    with pytest.raises(ApiError, match="has no name"):
        read_form("multipart/form-data; boundary=x", b"--x\r\n" + head + b"\r\n\r\nfile\r\n--x--")
    assert time.perf_counter() - began < 2


def test_transcription_of_a_model_of_a_folder(tmp_path: Path) -> None:
    """The router reads the model's name in the form."""
    (tmp_path / "hearing").mkdir()
    write_hearing_model(tmp_path / "hearing")
    write_text(tmp_path / "plain.gguf")
    with router(tmp_path) as (client, _):
        found = transcribed(client, model="hearing/text")
        assert found.status_code == 200 and found.json()["type"] == "transcript.text.done", found.text
        assert refused(transcribed(client, model="plain")) == NO_MEDIA.format("audio")


def test_both_kinds_in_one_text(tmp_path: Path) -> None:
    """A file with encoders of both; the marks of each are where they belong."""
    from tests.cpu.media.sound_towers import SoundTower, merged_projector

    write_text(tmp_path / "text.gguf")
    write_projector(tmp_path / "seeing.gguf")
    sounds = SoundTower("ultravox", d=32, heads=2, ff=32, layers=1, text=64, stack=31)
    merged_projector(tmp_path / "mmproj.gguf", tmp_path / "seeing.gguf", sounds)
    started = start(tmp_path)
    try:
        both = TestClient(started.app, raise_server_exceptions=False)
        assert both.get("/props").json()["modalities"] == {"vision": True, "video": False, "audio": True}
        picture = {"type": "image_url", "image_url": {"url": data_uri(png(1))}}
        answer = chat(both, text("whatis"), picture, text("and"), sound())
        seen, heard = chat(both, text("whatis"), picture, text("and")), chat(both, text("whatis"), text("and"), sound())
        counts = [each["usage"]["prompt_tokens"] for each in (answer, seen, heard)]
        assert counts[0] == counts[1] + ROWS and counts[0] > counts[2]
        assert len(said(answer)) > 3
    finally:
        started.engine.stop(10)


def test_write_sound_projector_is_heard(tmp_path: Path) -> None:
    """A projector for another text model ends in one line."""
    from ikpy.errors import UsageError

    write_text(tmp_path / "text.gguf")
    write_sound_projector(tmp_path / "mmproj.gguf", d=96)
    with pytest.raises(UsageError, match="makes rows of 96 elements, the text model wants 64"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("kind", "n_rows"),
    [("", ROWS), ("granite_speech", 15), ("lfm2a", 19), ("parakeet", 19), ("gemma3na", 188)],
)
def test_a_saved_sound_serves_another_process(kind: str, n_rows: int, files: Path, tmp_path: Path) -> None:
    """As an unbroken run goes on; another sound was heard there before."""
    if kind:
        files = tmp_path / "hearing"
        files.mkdir()
        write_text(files / "text.gguf")
        TOWERS[kind].write(files / "mmproj.gguf", TOWERS[kind].weights())

    def native(client: TestClient, words: str, heard: bytes) -> Json:
        prompt = {"prompt_string": words, "multimodal_data": [base64_of(heard)]}
        body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "n_probs": 8, "ignore_eos": True}
        response = client.post("/completion", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def first(answer: Json) -> dict[int, float]:
        return {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}

    words, answers = f"hear{MARKER}what", []
    for action in ("save", "restore"):
        server = start(files, "--slot-save-path", str(tmp_path), "--cache-ram", "0")
        client = TestClient(server.app, raise_server_exceptions=False)
        try:
            if action == "save":
                words += native(client, words, HEARD)["content"] + "and"
            else:
                native(client, MARKER, wav(tone(1.1, 7)))
            response = client.post(f"/slots/0?action={action}", json={"filename": "x"})
            assert response.status_code == 200, response.text
            answers.append(native(client, words, HEARD))
        finally:
            server.engine.stop(10)
    assert first(answers[1]) == pytest.approx(first(answers[0]), abs=5e-5)
    assert answers[0]["timings"]["cache_n"] == answers[1]["timings"]["cache_n"] > n_rows
