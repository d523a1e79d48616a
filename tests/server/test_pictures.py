"""Requests with pictures: every API, caches, slots, and what is refused. Model and projector are tiny and random."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import load
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.params import ContextParams
from ikpy.errors import UsageError
from ikpy.server import media
from ikpy.server.build import Server
from ikpy.server.log import ServerLog
from ikpy.server.media import NO_MEDIA, NO_PROJECTOR
from ikpy.tools import media_tokens
from ikpy.tools.media_marks import MARKER
from ikpy.tools.pictures import Picture
from tests.picture_models import (
    IMAGE,
    N_ROWS,
    data_uri,
    png,
    write_grid_projector,
    write_grid_text,
    write_projector,
    write_text,
)
from tests.server.harness import read_events
from tests.server.live import wait_for
from tests.server.test_router import router

HINT = NO_MEDIA.format("image")
LENGTH = {"max_tokens": 6, "temperature": 0}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model and projector."""
    folder = tmp_path_factory.mktemp("pictures")
    write_text(folder / "text.gguf")
    write_projector(folder / "mmproj.gguf")
    return folder


def start(files: Path, *more: str, mmproj: bool = True) -> Server:
    """A server with F32 caches, started."""
    line = ["-m", str(files / "text.gguf"), "-t", "1", "-c", "512", "-ctk", "f32", "-ctv", "f32", "--log-disable"]
    line += ["--mmproj", str(files / "mmproj.gguf")] if mmproj else []
    server = make_server(load(parse([*line, *more], "server")), ServerLog())
    server.engine.start()
    return server


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[TestClient]:
    try:
        yield TestClient(server.app, raise_server_exceptions=False)
    finally:
        server.engine.stop(10)


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    started = start(files)
    yield started
    started.engine.stop(10)


@pytest.fixture(scope="module")
def client(server: Server) -> TestClient:
    return TestClient(server.app, raise_server_exceptions=False)


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def picture(seed: int, **size: int) -> Json:
    return {"type": "image_url", "image_url": {"url": data_uri(png(seed, **size))}}


def asked(*parts: Json, **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(parts)}], **LENGTH, **more}


def chat(client: TestClient, *parts: Json, **more: Any) -> Json:
    """The answer to a chat request."""
    response = client.post("/v1/chat/completions", json=asked(*parts, **more))
    assert response.status_code == 200, response.text
    return response.json()


def said(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"]


def logprobs(answer: Json) -> np.ndarray:
    """Of the tokens of an answer."""
    return np.array([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])


def refused(response: Any) -> str:
    """The message of an error of one line."""
    assert response.status_code == 400, response.text
    body = response.json()["error"]
    message = body if isinstance(body, str) else body["message"]
    assert "\n" not in message
    return message


QUESTION = text("whatis"), picture(1), text("this")
PROMPT = f"<start_of_turn>user\nwhatis{MARKER}this<end_of_turn>\n<start_of_turn>model\n"


def direct_logprobs(server: Server, prompt: str, pictures: list[bytes], n: int) -> np.ndarray:
    """Log-probabilities of the first n tokens of the greedy answer to a prompt with markers, without the server: the
    pictures are encoded and one batch put together here."""
    session = load(parse(["-m", server.front.settings.model_path, "--log-disable"], "server"))
    assert server.front.media is not None
    projector = server.front.media._projector
    store = MediaStore(session.model.hparams.n_vocab, 1 << 24)
    tokens = [2]
    for i, words in enumerate(prompt.split(MARKER)):
        pieces = [] if i == 0 else projector.encode(Picture.of_file(pictures[i - 1]).content())
        for j, piece in enumerate([*pieces, words]):
            if isinstance(piece, str):
                tokens += session.vocab.tokenize(piece, add_special=False, parse_special=True)
            else:
                tokens += store.add(b"%d %d" % (i, j), lambda piece=piece: piece)
    params = ContextParams(n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", media=store)
    context = Context(session.model, params)
    found, logits = [], context.decode(Batch.single(tokens))[-1].astype(np.float64)
    for i in range(n):
        token = int(logits.argmax())
        found.append(float(logits[token] - np.log(np.exp(logits).sum())))
        batch = Batch.single([token], len(tokens) + i, turn=store.turn(tokens))
        logits = context.decode(batch)[-1].astype(np.float64)
    return np.array(found)


def test_an_answer_is_that_of_the_engine(server: Server, client: TestClient) -> None:
    answer = chat(client, *QUESTION, logprobs=True)
    np.testing.assert_allclose(logprobs(answer), direct_logprobs(server, PROMPT, [png(1)], 6), atol=2e-5)
    other = chat(client, text("whatis"), picture(2), text("this"), logprobs=True)
    assert np.abs(logprobs(other) - logprobs(answer)).max() > 1e-3, "the picture has no influence"
    assert answer["usage"]["prompt_tokens"] == len("whatisthis") + len("user\nmodel\n\n") + 4 + N_ROWS + 2


def test_streams_say_the_same(client: TestClient) -> None:
    whole = said(chat(client, *QUESTION))
    response = client.post("/v1/chat/completions", json=asked(*QUESTION, stream=True))
    events = [event["data"] for event in read_events(response.text) if event["data"] != "[DONE]"]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == whole


def test_a_picture_that_was_seen_is_not_evaluated_again(server: Server, client: TestClient) -> None:
    first = chat(client, *QUESTION, logprobs=True)
    again = chat(client, *QUESTION, logprobs=True)
    n = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == n - 1
    np.testing.assert_allclose(logprobs(again), logprobs(first), atol=2e-5)
    other = chat(client, text("whatis"), picture(7), text("this"))
    assert 0 < other["usage"]["prompt_tokens_details"]["cached_tokens"] < n - N_ROWS
    # The text of the first picture went to the cache in host memory, from which it comes back.
    third = chat(client, *QUESTION, logprobs=True)
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == n - 1
    np.testing.assert_allclose(logprobs(third), logprobs(first), atol=2e-5)


def test_two_pictures(client: TestClient) -> None:
    both = chat(client, picture(1), text("and"), picture(2), logprobs=True)
    swapped = chat(client, picture(2), text("and"), picture(1), logprobs=True)
    assert both["usage"]["prompt_tokens"] == swapped["usage"]["prompt_tokens"]
    assert np.abs(logprobs(both) - logprobs(swapped)).max() > 1e-3
    twice = chat(client, picture(1), picture(1), logprobs=True)
    assert np.isfinite(logprobs(twice)).all()


@pytest.mark.parametrize("more", [["-b", "16", "-ub", "16"], ["-b", "40", "-ub", "24"], ["-fa", "off"]])
def test_small_batches_cut_no_picture(files: Path, client: TestClient, more: list[str]) -> None:
    parts = text("what"), picture(1), text("or"), picture(2), picture(1), text("x")
    want = chat(client, *parts, logprobs=True)
    with client_of(start(files, *more)) as other:
        got = chat(other, *parts, logprobs=True)
    assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    np.testing.assert_allclose(logprobs(got), logprobs(want), atol=1e-4)


def test_a_picture_that_fits_no_micro_batch(files: Path) -> None:
    with client_of(start(files, "-ub", "8")) as client:
        message = refused(client.post("/v1/chat/completions", json=asked(*QUESTION)))
        assert f"{N_ROWS} tokens of a picture" in message and "-ub" in message
        assert said(chat(client, text("hello")))


@pytest.mark.parametrize("more", [[], ["-b", "48", "-ub", "16"], ["-np", "3", "-fa", "off"]])
def test_places_of_pictures_in_a_grid(tmp_path: Path, more: list[str]) -> None:
    """Rows and columns count for rotation: in parts of prompts, behind pictures that were cached, and in answers."""
    write_grid_text(tmp_path / "text.gguf")
    write_grid_projector(tmp_path / "mmproj.gguf")
    wide, high = {"width": 150, "height": 60}, {"width": 50, "height": 170}
    turns = [{"role": "user", "content": [text("look"), picture(1, **wide), text("at"), picture(2, **high)]}]
    prompt, pictures = f"<start_of_turn>user\nlook{MARKER}at{MARKER}<end_of_turn>\n", [png(1, **wide), png(2, **high)]
    server = start(tmp_path, "-c", "3072", *more)
    with client_of(server) as client:
        for words, seed in (("first", 3), ("second", 4)):
            body = {"messages": turns, "logprobs": True, **LENGTH}
            answer = client.post("/v1/chat/completions", json=body).json()
            want = direct_logprobs(server, f"{prompt}<start_of_turn>model\n", pictures, 6)
            np.testing.assert_allclose(logprobs(answer), want, atol=5e-5)
            turns.append({"role": "assistant", "content": "well"})
            turns.append({"role": "user", "content": [picture(seed, **wide), text(words)]})
            prompt += (
                f"<start_of_turn>assistant\nwell<end_of_turn>\n<start_of_turn>user\n{MARKER}{words}<end_of_turn>\n"
            )
            pictures.append(png(seed, **wide))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_parallel_slots(files: Path, client: TestClient) -> None:
    """Eight requests at once, with pictures and without, in three slots say what each says alone."""
    requests = [(text(f"q{i}"), *([picture(i % 3)] if i % 4 else []), text("end")) for i in range(8)]
    want = [said(chat(client, *parts)) for parts in requests]
    with client_of(start(files, "-np", "3", "-c", "1536")) as other, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda parts: said(chat(other, *parts)), requests)) == want


def test_answers_go_on_between_pictures(files: Path) -> None:
    """Of several pictures that wait to be encoded one goes before each token of a running answer."""
    server = start(files, "-np", "4", "-c", "16384")
    reader = server.front.media
    assert reader is not None
    projector, counts = reader._projector, list[int]()

    class Slow:
        def encode(self, image: Any) -> Any:
            counts.append(sum(slot.n_decoded for slot in server.engine.slots))
            time.sleep(0.1)
            return projector.encode(image)

    reader._projector = Slow()
    with client_of(server) as client, ThreadPoolExecutor(4) as pool:
        running = pool.submit(chat, client, text("hello"), max_tokens=3000, ignore_eos=True)
        assert wait_for(lambda: any(slot.n_decoded > 3 for slot in server.engine.slots))
        list(pool.map(lambda seed: chat(client, picture(20 + seed), max_tokens=1), range(3)))
        assert said(running.result())
    assert len(counts) == 3 and counts[0] < counts[1] < counts[2]


def test_rows_that_went_are_made_again(files: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = picture(1), text("or"), picture(2), text("x")
    want = said(chat(client, *parts)), said(chat(client, *QUESTION))
    monkeypatch.setattr(media_tokens, "STORE_BYTES", 1)  # the rows of one picture stay
    for line in (["-b", "24", "-ub", "24"], ["-np", "3", "-c", "1536"]):
        with client_of(start(files, *line, "--cache-ram", "0")) as other, ThreadPoolExecutor(3) as pool:
            assert (said(chat(other, *parts)), said(chat(other, *QUESTION))) == want
            assert said(chat(other, *parts, cache_prompt=False)) == want[0]
            found = pool.map(lambda p: said(chat(other, *p, cache_prompt=False)), [parts, QUESTION, parts])
            assert list(found) == [want[0], want[1], want[0]]


# other APIs


def base64_of(seed: int) -> str:
    return base64.b64encode(png(seed)).decode()


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
    assert props["modalities"] == {"vision": True, "audio": False} and props["media_marker"] == MARKER
    assert client.get("/v1/props").json()["modalities"]["vision"]
    models = client.get("/v1/models").json()
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert models["models"][0]["input_modalities"] == ["text", "image"]
    chat(client, *QUESTION)
    assert MARKER in client.get("/slots/list").json()[0]["prompt"]


# what is refused


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
        assert client.get("/props").json()["modalities"] == {"vision": False, "audio": False}
        assert client.get("/v1/models").json()["models"][0]["input_modalities"] == ["text"]


def test_markers_in_messages_are_text(client: TestClient) -> None:
    alone = chat(client, text(f"say {MARKER}"))
    assert alone["usage"]["prompt_tokens"] < N_ROWS + len(MARKER) + 20
    both = chat(client, text(f"say {MARKER}"), picture(1))
    assert both["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"] + N_ROWS + 2


def test_templates_may_leave_out_pictures(files: Path) -> None:
    template = "{{ messages[-1].content }}"
    with client_of(start(files, "--chat-template", template)) as client:
        messages = [
            {"role": "user", "content": [picture(1), text("first")]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [text("second"), picture(2)]},
        ]
        body = {"messages": messages, **LENGTH}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 1 + len("second") + N_ROWS + 2
        alone = client.post("/v1/chat/completions", json=body | {"messages": messages[-1:]})
        assert said(answer.json()) == said(alone.json())


def test_too_long(files: Path) -> None:
    with client_of(start(files, "-c", "256")) as client:
        many = [picture(seed) for seed in range(16)]
        message = refused(client.post("/v1/chat/completions", json=asked(*many)))
        assert message == "the request exceeds the available context size, try increasing it"
        full = chat(client, *QUESTION, max_tokens=1000, ignore_eos=True)
        assert full["choices"][0]["finish_reason"] == "length"
        assert full["usage"]["total_tokens"] <= 257
        assert full["usage"]["completion_tokens"] > 100


def test_slots_with_pictures_are_not_saved(files: Path, tmp_path: Path) -> None:
    server = start(files, "--slot-save-path", str(tmp_path), "--slot-autosave")
    with client_of(server) as client:
        chat(client, *QUESTION)
        assert "pictures" in refused(client.post("/slots/0?action=save", json={"filename": "x"}))
        assert client.post("/slots/0?action=erase").json()["n_erased"] > N_ROWS
        chat(client, text("hello"))
        assert client.post("/slots/0?action=save", json={"filename": "x"}).status_code == 200
        assert client.post("/slots/0?action=restore", json={"filename": "x"}).status_code == 200


def test_drafts_leave_answers_as_they_are(files: Path, client: TestClient) -> None:
    """Behind pictures too, which these drafters do not see."""
    plain = text("aaaa bbbb aaaa bbbb aaaa")
    want = said(chat(client, *QUESTION, max_tokens=40)), said(chat(client, plain, max_tokens=20))
    with client_of(start(files, "--spec-type", "ngram-simple:n_max=8,size_n=1,size_m=4")) as other:
        found = chat(other, *QUESTION, max_tokens=40)
        assert said(found) == want[0] and found["timings"]["draft_n"] > 0
        assert said(chat(other, plain, max_tokens=20)) == want[1]
        assert said(chat(other, *QUESTION, max_tokens=40)) == want[0]


def test_a_prediction_layer_behind_pictures(tmp_path: Path) -> None:
    """Of several slots, whose texts are shared, kept in host memory and gone on with."""
    write_grid_text(tmp_path / "text.gguf", predicts=True)
    write_grid_projector(tmp_path / "mmproj.gguf")
    answers = []
    drafting = ["-mtp", "--draft-p-min", "0", "--draft-max", "3"]
    for more in ([], drafting):
        with client_of(start(tmp_path, "-c", "4096", "-np", "2", *more)) as client:
            first = chat(client, *QUESTION, max_tokens=24)
            other = chat(client, text("xyz"), max_tokens=6)
            messages = [*asked(*QUESTION)["messages"], {"role": "assistant", "content": said(first)}]
            messages.append({"role": "user", "content": [picture(7), text("and now?")]})
            again = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 24, "temperature": 0})
            answers.append([said(first), said(other), said(again.json())])
            if more:
                assert first["timings"]["draft_n"] > 20 and again.json()["timings"]["draft_n"] > 20
    assert answers[0] == answers[1]


def test_several_answers_and_penalties(client: TestClient) -> None:
    answer = chat(client, *QUESTION, n=2, seed=1, temperature=0.0, repeat_penalty=1.3, dry_multiplier=0.5)
    first, second = answer["choices"]
    assert first["message"]["content"] == second["message"]["content"]


# where pictures may come from


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


# the command line


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


def test_a_client_that_goes_away(server: Server, client: TestClient) -> None:
    """A stream that nobody reads to its end frees its slot."""
    body = json.dumps(asked(*QUESTION, stream=True, max_tokens=400, ignore_eos=True))
    with client.stream("POST", "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}) as r:
        next(r.iter_lines())
    assert said(chat(client, *QUESTION))
    assert server.engine.n_idle == 1
