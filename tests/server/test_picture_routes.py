"""Pictures in every API, where they come from, and what is refused. Model and projector are tiny and random."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.errors import UsageError
from ikpy.server import media
from ikpy.server.media import NO_PROJECTOR
from ikpy.tools.media_marks import MARKER
from tests.picture_models import (
    IMAGE,
    N_ROWS,
    data_uri,
    png,
    write_projector,
    write_text,
)
from tests.server.picture_requests import (
    HINT,
    LENGTH,
    PROMPT,
    QUESTION,
    Json,
    asked,
    base64_of,
    chat,
    client_of,
    picture,
    refused,
    said,
    start,
    text,
    write_files,
)
from tests.server.test_router import router


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def client(files: Path) -> Iterator[TestClient]:
    with client_of(start(files)) as client:
        yield client


def test_responses(client: TestClient) -> None:
    content = [
        {"type": "input_text", "text": "whatis"},
        {"type": "input_image", "image_url": data_uri(png(1))},
        {"type": "input_text", "text": "this"},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["output"][-1]["content"][0]["text"] == said(chat(client, *QUESTION))
    tokens = client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
    assert tokens == chat(client, *QUESTION)["usage"]["prompt_tokens"]
    del content[1]["image_url"]
    assert refused(client.post("/v1/responses", json=body)) == "'image_url' is required"


def test_messages(client: TestClient) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(1)}
    content = [text("whatis"), {"type": "image", "source": source}, text("this")]
    body = {"messages": [{"role": "user", "content": content}], **LENGTH}
    answer = client.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"] == said(chat(client, *QUESTION))
    counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == chat(client, *QUESTION)["usage"]["prompt_tokens"]
    source |= {"type": "url", "url": data_uri(png(1))}
    assert client.post("/v1/messages", json=body).json()["content"] == answer["content"]
    source["type"] = "file"
    assert "base64" in refused(client.post("/v1/messages", json=body))


def test_results_of_tools_show_pictures(client: TestClient) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(1)}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("see"), {"type": "image", "source": source}]}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    counted = client.post("/v1/messages/count_tokens", json={"messages": messages, **LENGTH}).json()["input_tokens"]
    result["content"] = [text("see")]
    without = client.post("/v1/messages/count_tokens", json={"messages": messages, **LENGTH}).json()["input_tokens"]
    assert counted == without + N_ROWS + 2


def test_native_prompts(client: TestClient) -> None:
    want = said(chat(client, *QUESTION))
    prompt = {"prompt_string": PROMPT, "multimodal_data": [base64_of(1)]}
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0}
    answer = client.post("/completion", json=body).json()
    assert answer["content"] == want and answer["prompt"] is None
    rendered = client.post("/apply-template", json=asked(*QUESTION)).json()["prompt"]
    assert rendered == PROMPT
    several = client.post("/completion", json=body | {"prompt": [prompt, "hello"]}).json()
    assert several[0]["content"] == want and len(several) == 2
    openai = client.post("/v1/completions", json={"prompt": prompt, **LENGTH}).json()
    assert openai["choices"][0]["text"] == want
    for data in ([], [base64_of(1)] * 2):
        wrong = body | {"prompt": {"prompt_string": PROMPT + MARKER * (not data), "multimodal_data": data}}
        response = client.post("/completion", json=wrong)
        assert not data or "Failed to tokenize prompt" in refused(response)
    wrong = body | {"prompt": {"prompt_string": PROMPT, "multimodal_data": [5]}}
    assert "multimodal_data" in refused(client.post("/completion", json=wrong))
    echoed = client.post("/v1/completions", json={"prompt": prompt, "echo": True, "max_tokens": 1})
    assert "echo" in refused(echoed)


def test_ollama(client: TestClient) -> None:
    want = said(chat(client, picture(1), text("whatisthis")))
    options = {"num_predict": 6, "temperature": 0}
    message = {"role": "user", "content": "whatisthis", "images": [base64_of(1)]}
    body = {"messages": [message], "stream": False, "options": options}
    assert client.post("/api/chat", json=body).json()["message"]["content"] == want
    body = {"prompt": "whatisthis", "images": [base64_of(1)], "stream": False, "options": options}
    generated = client.post("/api/generate", json=body).json()
    assert generated["response"] == want
    assert max(generated["context"]) < 400, "ids that stand for rows are no tokens of clients"
    raw = client.post("/api/generate", json=body | {"raw": True}).json()
    assert raw["response"] and raw["prompt_eval_count"] == 1 + len("whatisthis") + N_ROWS + 2
    assert "vision" in client.post("/api/show", json={"model": "x"}).json()["capabilities"]
    assert "'images'" in refused(client.post("/api/chat", json={"messages": [message | {"images": "x"}]}))


def test_what_clients_are_told(client: TestClient) -> None:
    props = client.get("/props").json()
    assert props["modalities"] == {"vision": True, "video": False, "audio": False} and props["media_marker"] == MARKER
    assert client.get("/v1/props").json()["modalities"]["vision"]
    models = client.get("/v1/models").json()
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert models["models"][0]["input_modalities"] == ["text", "image"]
    chat(client, *QUESTION)
    assert MARKER in client.get("/slots/list").json()[0]["prompt"]


BROKEN = data_uri(png(1)[:200])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": BROKEN}}, "Failed to load image or audio file: image cannot be"),
        ({"type": "image_url", "image_url": {"url": data_uri(b"hello")}}, "Failed to load image or audio file"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "uri must be base64 encoded"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "Invalid uri-encoded base64 value"),
        ({"type": "image_url", "image_url": {"url": data_uri(b"x", "text/plain")}}, "Invalid uri format: data:text"),
        ({"type": "image_url", "image_url": {"url": 5}}, "'image_url' must be an object with a string 'url'"),
        ({"type": "image_url"}, "'image_url' must be an object with a string 'url'"),
        (
            {"type": "image_url", "image_url": {"url": "file://a.png"}},
            "file:// URLs are not allowed unless --media-path",
        ),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "Failed to download image"),
        ({"type": "image_url", "image_url": {"url": "http://[::1"}}, "Failed to download image"),
        ({"type": "image"}, "unsupported content[].type"),
        ({"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}}, "audio input is not supported"),
        ({"type": "input_video"}, "video input is not supported"),
    ],
)
def test_pictures_that_cannot_be_used(client: TestClient, part: Json, message: str) -> None:
    assert refused(client.post("/v1/chat/completions", json=asked(text("x"), part))).startswith(message)
    assert said(chat(client, text("hello")))


def test_without_a_projector(files: Path) -> None:
    with client_of(start(files, mmproj=False)) as client:
        assert refused(client.post("/v1/chat/completions", json=asked(*QUESTION))) == HINT
        assert refused(client.post("/apply-template", json=asked(*QUESTION))) == HINT
        source = {"type": "base64", "media_type": "image/png", "data": base64_of(1)}
        blocks = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        assert refused(client.post("/v1/messages", json={"messages": blocks, **LENGTH})) == HINT
        item = {"role": "user", "content": [{"type": "input_image", "image_url": data_uri(png(1))}]}
        assert refused(client.post("/v1/responses", json={"input": [item]})) == HINT
        message = {"role": "user", "content": "x", "images": [base64_of(1)]}
        assert refused(client.post("/api/chat", json={"messages": [message]})) == HINT
        prompt = {"prompt_string": MARKER, "multimodal_data": [base64_of(1)]}
        assert refused(client.post("/completion", json={"prompt": prompt})) == NO_PROJECTOR
        assert client.get("/props").json()["modalities"] == {"vision": False, "video": False, "audio": False}
        assert client.get("/v1/models").json()["models"][0]["input_modalities"] == ["text"]


def test_markers_in_messages_are_text(client: TestClient) -> None:
    alone = chat(client, text(f"say {MARKER}"))
    assert alone["usage"]["prompt_tokens"] < N_ROWS + len(MARKER) + 20
    both = chat(client, text(f"say {MARKER}"), picture(1))
    assert both["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"] + N_ROWS + 2


def test_files_of_the_folder(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "media"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(1))
    (folder / "link.png").symlink_to(tmp_path / "b.png")

    def of(url: str) -> Json:
        return asked(text("whatis"), {"type": "image_url", "image_url": {"url": url}}, text("this"))

    with client_of(start(files, "--media-path", str(folder))) as client:
        want = said(chat(client, *QUESTION))
        assert said(client.post("/v1/chat/completions", json=of("file://in/a.png")).json()) == want
        for name in ("../b.png", "link.png", "in/../../b.png"):
            message = refused(client.post("/v1/chat/completions", json=of(f"file://{name}")))
            assert message == f"file path is not allowed: {name}"
        for name in ("c.png", "in", "/etc/hostname", "a\0b", "x" * 5000):
            message = refused(client.post("/v1/chat/completions", json=of(f"file://{name}")))
            assert message == f"file does not exist or cannot be opened: {name[:100]}"


@pytest.fixture
def host() -> Iterator[str]:
    """Address of a host with a picture, and with what is none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                self.end_headers()
                return
            found = {"/a.png": png(1), "/large.png": bytes(11 << 20), "/page": b"<html>"}.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_downloads(client: TestClient, files: Path, host: str) -> None:
    def of(url: str) -> Json:
        return asked(text("whatis"), {"type": "image_url", "image_url": {"url": url}}, text("this"))

    want = said(chat(client, *QUESTION))
    for name in ("a", "moved"):
        assert said(client.post("/v1/chat/completions", json=of(f"{host}/{name}.png")).json()) == want
    for name, message in (
        ("b.png", "Failed to download image: the host answered 404"),
        ("large.png", "Failed to download image: more than 10 MiB"),
        ("page", "Failed to load image or audio file"),
    ):
        assert refused(client.post("/v1/chat/completions", json=of(f"{host}/{name}"))).startswith(message)
    with client_of(start(files, "--offline")) as other:
        message = refused(other.post("/v1/chat/completions", json=of(f"{host}/a.png")))
        assert message == "Failed to download image: --offline forbids it"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mmproj {0}/none.gguf", "--mmproj .*none.gguf: No such file"),
        ("--mmproj {0}/text.gguf", "text.gguf is no projector file: its architecture is 'gemma3'"),
        ("--mmproj {0}/wide.gguf", "it is another model's"),
        ("--mmproj {0}/mmproj.gguf --media-path {0}/none", "--media-path .*: no such directory"),
        ("--mmproj {0}/mmproj.gguf --image-min-tokens 9 --image-max-tokens 8", "--image-min-tokens 9 is above"),
    ],
)
def test_command_lines_that_cannot_be_used(files: Path, line: str, message: str) -> None:
    write_projector(files / "wide.gguf", d=96)
    with pytest.raises(UsageError, match=message):
        start(files, *line.format(files).split(), mmproj=False)


def test_no_mmproj(files: Path) -> None:
    with client_of(start(files, "--no-mmproj")) as client:
        assert refused(client.post("/v1/chat/completions", json=asked(*QUESTION))) == HINT


def test_models_of_a_folder_with_their_projectors(tmp_path: Path) -> None:
    """One that fits is used, one of another model is left out; in the folder itself none is taken."""
    write_text(tmp_path / "plain.gguf")
    for name, d in (("seeing", 64), ("other", 96)):
        (tmp_path / name).mkdir()
        write_text(tmp_path / name / "text.gguf")
        write_projector(tmp_path / name / "mmproj-F16.gguf", d)
    write_projector(tmp_path / "mmproj.gguf")
    with router(tmp_path) as (client, _):
        body = asked(*QUESTION)
        answer = client.post("/v1/chat/completions", json=body | {"model": "seeing/text"})
        assert answer.status_code == 200, answer.text
        for name in ("other/text", "plain"):
            assert refused(client.post("/v1/chat/completions", json=body | {"model": name})) == HINT
    assert "warning: no pictures and sounds: " in (tmp_path / "log").read_text()


def test_a_projector_in_the_folder_of_the_model(files: Path) -> None:
    with client_of(start(files, "--mmproj-auto", mmproj=False)) as client:
        assert said(chat(client, *QUESTION))


def test_embeddings_of_pictures(files: Path) -> None:
    line = "--embeddings", "--pooling", "mean"
    with client_of(start(files, *line)) as client:
        prompt = {"prompt_string": f"a{MARKER}b", "multimodal_data": [base64_of(1)]}
        found = [
            client.post("/embedding", json={"content": content}).json()[0]["embedding"][0]
            for content in (prompt, prompt, prompt | {"multimodal_data": [base64_of(2)]}, "ab")
        ]
    assert found[0] == found[1]
    assert np.abs(np.array(found[0]) - found[2]).max() > 1e-4
    assert np.abs(np.array(found[0]) - found[3]).max() > 1e-4


def test_pictures_of_a_request_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MOST_PIXELS", 3 * IMAGE * IMAGE)
    three, four = ([picture(i) for i in range(n)] for n in (3, 4))
    want = said(chat(client, *three))
    assert "megapixels" in refused(client.post("/v1/chat/completions", json=asked(*four)))
    monkeypatch.setattr(media, "KEPT_BYTES", 3 * IMAGE * IMAGE)  # others are decoded twice
    assert said(chat(client, *three)) == want
    monkeypatch.setattr(media, "MOST_BYTES", 100)
    assert "MiB together" in refused(client.post("/v1/chat/completions", json=asked(*three)))
    monkeypatch.setattr(media, "MOST_MEDIA", 2)
    assert refused(client.post("/v1/chat/completions", json=asked(*three))) == "too many media files, the maximum is 2"
