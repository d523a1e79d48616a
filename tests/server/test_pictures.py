"""Answers about pictures: caches, slots, batches and drafts. Model and projector are tiny and random."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.cli.parser import parse
from ikpy.cli.session import load
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.params import ContextParams
from ikpy.engine.sequence_state import load_sequence
from ikpy.engine.session import PREFIX
from ikpy.errors import FileFormatError
from ikpy.server.build import Server
from ikpy.server.slot_files import restore_slots, save_slots
from ikpy.tools import media_tokens
from ikpy.tools.media_marks import MARKER
from ikpy.tools.pictures import Picture
from tests.picture_models import (
    N_ROWS,
    png,
    write_grid_projector,
    write_grid_text,
)
from tests.server.harness import read_events
from tests.server.live import wait_for
from tests.server.picture_requests import (
    LENGTH,
    PROMPT,
    QUESTION,
    asked,
    chat,
    client_of,
    logprobs,
    picture,
    refused,
    said,
    start,
    text,
    write_files,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    started = start(files)
    yield started
    started.engine.stop(10)


@pytest.fixture(scope="module")
def client(server: Server) -> TestClient:
    return TestClient(server.app, raise_server_exceptions=False)


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


@pytest.mark.parametrize("kind", ["plain", "without shift", "with a drafter", "with grids"])
def test_full_contexts(kind: str, files: Path, tmp_path: Path) -> None:
    """Old tokens go, and the picture as a whole; answers end where that is off, pictures turn positions, or drafters
    read the text. The next request is answered as the first one."""
    options = {"without shift": ["--no-context-shift"], "with a drafter": ["--spec-type", "ngram-simple"]}
    folder = grid_files(tmp_path) if kind == "with grids" else files
    with client_of(start(folder, "-c", "256", *options.get(kind, []))) as client:
        before = chat(client, *QUESTION)
        full = chat(client, *QUESTION, max_tokens=600, ignore_eos=True)
        assert full["choices"][0]["finish_reason"] == "length"
        answered, total = (full["usage"][f"{name}_tokens"] for name in ("completion", "total"))
        assert answered == 600 if kind == "plain" else answered > 100 and total <= 257
        assert said(chat(client, *QUESTION)) == said(before)


def grid_files(folder: Path) -> Path:
    """A model whose positions count rows and columns of pictures, with a prediction layer."""
    write_grid_text(folder / "text.gguf", predicts=True)
    write_grid_projector(folder / "mmproj.gguf")
    return folder


def native(client: TestClient, words: str, *pictures: bytes) -> dict[str, Any]:
    """The answer of the native route, its first token with probabilities."""
    data = [base64.b64encode(file).decode() for file in pictures]
    prompt = {"prompt_string": words, "multimodal_data": data}
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "n_probs": 8, "ignore_eos": True}
    response = client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def first_logprobs(answer: dict[str, Any]) -> dict[int, float]:
    """Of the tokens that could have come first, by their ids."""
    return {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}


@pytest.mark.parametrize("kind", ["flat", "grid", "grid with drafts"])
def test_saved_pictures_serve_another_process(files: Path, tmp_path: Path, kind: str) -> None:
    """As an unbroken run goes on. Ids are others there: other pictures came before."""
    folder = files if kind == "flat" else grid_files(tmp_path)
    more = ["-c", "4096", "--slot-save-path", str(tmp_path), "--cache-ram", "0"]
    more += ["-mtp", "--draft-p-min", "0"] if kind == "grid with drafts" else []
    words, pictures = f"a{MARKER}or{MARKER}what", [png(3), png(1, width=90)]
    with client_of(start(folder, *more)) as client:
        native(client, MARKER, png(8))
        words += native(client, words, *pictures)["content"] + f"and{MARKER}now"
        saved = client.post("/slots/0?action=save", json={"filename": "x"}).json()
        want = native(client, words, *pictures, png(6, width=70))
        assert client.get("/list").json()[0]["prompt"].count(MARKER) == 2
    with client_of(start(folder, *more)) as client:
        native(client, MARKER * 2, png(6, width=70), png(1, width=90))
        restored = client.post("/slots/0?action=restore", json={"filename": "x"}).json()
        assert restored["n_restored"] == saved["n_saved"]
        found = native(client, words, *pictures, png(6, width=70))
        assert found["tokens_cached"] == want["tokens_cached"] and found["content"] == want["content"]
        assert found["timings"]["cache_n"] == want["timings"]["cache_n"] > 2 * N_ROWS
        assert first_logprobs(found) == pytest.approx(first_logprobs(want), abs=5e-5)
        client.post("/slots/0?action=restore", json={"filename": "x"})
        other = native(client, f"a{MARKER}or{MARKER}what", png(4), png(1, width=90))
        assert other["timings"]["cache_n"] <= 18, "only the text before: another picture is not the saved one"


def test_pictures_of_another_projector(files: Path, tmp_path: Path) -> None:
    line = ["--slot-save-path", str(tmp_path)]
    with client_of(start(files, *line)) as client:
        chat(client, *QUESTION)
        assert client.post("/slots/0?action=save", json={"filename": "x"}).status_code == 200
        chat(client, text("hello"), cache_prompt=False)
        assert client.post("/slots/0?action=save", json={"filename": "text"}).status_code == 200
    for mmproj in (True, False):
        server = start(files, *line, mmproj=mmproj)
        with client_of(server) as client:
            if mmproj:
                server.engine.context.params.media.projector = "another"
            assert client.post("/slots/0?action=restore", json={"filename": "text"}).status_code == 200
            assert "Unable to restore slot" in refused(client.post("/slots/0?action=restore", json={"filename": "x"}))
            with pytest.raises(FileFormatError, match="another projector"):
                load_sequence(tmp_path / "x", server.engine.context, 0, 500)


@pytest.mark.parametrize(
    "pictures",
    [
        [],
        5,
        [["00", 1, None, False, 1]],
        [["zz", 16, None, True, 16]],
        [["00", 0, None, True, 16], ["01", 16, None, True, 16]],
        [["00", "16", None, True, 16]],
        [["00", 16, None, 1, 16]],
        [["00", 16, [4], True, 16]],
        [["00", 16, 4, True, 16]],
        [["00", 16, [4, 0], True, 16]],
        [["00", 1 << 40, None, True, 16]],
        [["00", 513, None, True, 16]],  # more than a context has
        [["00", 16, None, True, 17]],
        [["00", 16, [17, 1], True, 16]],
        [["00", 16, None, True, 16], ["01", 16, None, True, 16]],  # no token stands for the second one
        [["00", 8, None, True, 8], ["00", 8, None, True, 8]],
        [["00", 16]],
        None,
    ],
)
def test_damaged_lists_of_pictures(files: Path, tmp_path: Path, pictures: Any) -> None:
    """With the right checksum: as no program writes them."""
    with client_of(start(files, "--slot-save-path", str(tmp_path))) as client:
        chat(client, *QUESTION)
        client.post("/slots/0?action=save", json={"filename": "x"})
        data = (tmp_path / "x").read_bytes()
        magic, version, _, length = PREFIX.unpack_from(data)
        header = json.loads(data[PREFIX.size : PREFIX.size + length])
        header["media"] = header["media"] | {"pictures": pictures} if pictures is not None else "x"
        changed = json.dumps(header).encode()
        body = changed + data[PREFIX.size + length :]
        (tmp_path / "x").write_bytes(PREFIX.pack(magic, version, zlib.crc32(body), len(changed)) + body)
        assert "Unable to restore slot" in refused(client.post("/slots/0?action=restore", json={"filename": "x"}))
        assert said(chat(client, *QUESTION))


def test_slots_with_pictures_are_kept_over_a_restart(files: Path, tmp_path: Path) -> None:
    line = ["--slot-save-path", str(tmp_path), "--slot-autosave"]
    server = start(files, *line)
    with client_of(server) as client:
        want = chat(client, *QUESTION)
    save_slots(server)
    server = start(files, *line)
    server.engine.stop(10)
    restore_slots(server)
    assert len(server.engine.slots[0].tokens) == want["usage"]["total_tokens"] - 1
    assert server.engine.slots[0].holds_media


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


def test_a_client_that_goes_away(server: Server, client: TestClient) -> None:
    """A stream that nobody reads to its end frees its slot."""
    body = json.dumps(asked(*QUESTION, stream=True, max_tokens=400, ignore_eos=True))
    with client.stream("POST", "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}) as r:
        next(r.iter_lines())
    assert said(chat(client, *QUESTION))
    assert server.engine.n_idle == 1
