"""Routes that editors and clients of today's llama-server use: infill, pieces of tokens, counts, encoded bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.cli.parser import parse
from ikpy.errors import UsageError
from ikpy.server.errors import ApiError
from ikpy.server.routes_infill import infill_prompt
from ikpy.server.settings import ServerSettings
from tests.server.harness import MODELS, loaded, read_events, running

TEXT = {"prompt": "The old man looked at", "n_predict": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 2}


@pytest.fixture(name="client", scope="module")
def model_client() -> Iterator[TestClient]:
    with running("llama-server -m MODEL -t 1 -c 512 -np 1") as client:
        yield client


class EditorVocab:
    """Characters as tokens, and fill-in-the-middle tokens."""

    fim_pre, fim_suf, fim_mid, fim_sep, fim_rep, bos, add_bos = 1001, 1002, 1003, 1004, 1005, 1000, True

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        assert not add_special
        return [ord(letter) for letter in text]


class EditorFront:
    """A front with such a vocabulary."""

    vocab = EditorVocab()

    def __init__(self, *, spm_infill: bool = False) -> None:
        self.settings = ServerSettings(spm_infill=spm_infill)


def infill_tokens(body: dict[str, Any], n_room: int = 100, *, spm_infill: bool = False) -> list[int]:
    return infill_prompt(EditorFront(spm_infill=spm_infill), body, n_room).tokens  # type: ignore[arg-type]


def test_infill_goes_on_with_the_prompt() -> None:
    extra = [{"filename": "f", "text": "t"}]
    body = {"input_prefix": "ab", "input_suffix": "c", "prompt": "de", "input_extra": extra}
    repository = [1000, 1005, *map(ord, "myproject\n"), 1004, *map(ord, "f\nt\n"), 1004, *map(ord, "filename\n")]
    found = infill_tokens(body)
    assert found == [*repository, 1001, *map(ord, "ab"), 1002, ord("c"), 1003, *map(ord, "de")]
    found = infill_tokens(body, spm_infill=True)
    assert found == [*repository, 1002, ord("c"), 1001, *map(ord, "ab"), 1003, *map(ord, "de")]
    assert infill_tokens({}) == infill_tokens(dict.fromkeys(body)) == [1000, 1001, 1002, 1003]
    with pytest.raises(ApiError, match='"prompt" must be a string'):
        infill_tokens({"prompt": [1]})


@pytest.mark.parametrize("file", [{"filename": "f"}, {"text": 5}, {"text": None}, {"filename": 5, "text": "t"}, "f", 5])
def test_other_files_are_texts(file: Any) -> None:
    with pytest.raises(ApiError, match='"input_extra"'):
        infill_tokens({"input_prefix": "a", "input_extra": [{"text": "t"}, file]})


def test_infill_keeps_what_is_nearest_to_the_gap() -> None:
    extra = [{"filename": name, "text": "t"} for name in "fgh"]
    body = {"input_prefix": "0123456789", "input_suffix": "abcdefgh", "prompt": "de", "input_extra": extra}

    def shown(n_room: int, **more: str) -> str:
        return "".join(chr(t) if t < 1000 else "^<>~|@"[t - 1000] for t in infill_tokens(body | more, n_room))

    whole = "<0123456789>abcdefgh~de"
    head, tail = "^@myproject\n", f"|filename\n{whole}"
    assert shown(60) == f"{head}|f\nt\n|g\nt\n|h\nt\n{tail}"
    assert shown(59) == shown(55) == f"{head}|g\nt\n|h\nt\n{tail}"
    assert shown(54) == f"{head}|h\nt\n{tail}"
    assert shown(49) == shown(24) == f"^{whole}"
    assert shown(18) == "^<123456789>abc~de"
    assert shown(14) == "^<456789>ab~de"
    assert shown(14, input_prefix="9") == "^<9>abcdefg~de"
    assert shown(3) == "^<>~de"


def test_infill_leaves_room_for_the_answer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = loaded(MODELS["MODEL"]).vocab
    for name, token in (("fim_pre", 300), ("fim_suf", 301), ("fim_mid", 302)):
        monkeypatch.setattr(vocab, name, token)
    body = {"input_prefix": "The sea was blue. " * 200, "input_extra": [{"text": "and the ship " * 20}] * 30}
    for n_predict, most in ((20, 511 - 20), (-1, 511 - 128), (10_000, 511 - 256)):
        more = {"n_predict": n_predict, "t_max_predict_ms": 1, "temperature": 0}
        found = client.post("/infill", json=body | more).raise_for_status().json()
        assert most - 5 < found["tokens_evaluated"] <= most and not found["truncated"]


def test_infill_answers_all_that_it_was_asked_for(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = loaded(MODELS["MODEL"]).vocab
    for name, token in (("fim_pre", 300), ("fim_suf", 301), ("fim_mid", 302)):
        monkeypatch.setattr(vocab, name, token)
    body = {"input_prefix": "The old man", "input_suffix": "sea", "n_predict": 4, "temperature": 0}
    one, two = (client.post("/infill", json={**body, "n": n}).raise_for_status().json() for n in (1, 2))
    assert one["stop"] and [answer["content"] for answer in two] == [one["content"]] * 2


def test_pieces_of_tokens(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"content": "Hi 🙂"}).json()["tokens"]
    found = client.post("/tokenize", json={"content": "Hi 🙂", "with_pieces": True}).json()["tokens"]
    assert [item["id"] for item in found] == ids
    data = b"".join(p.encode() if isinstance(p := item["piece"], str) else bytes(p) for item in found)
    assert data.decode() == "Hi 🙂"
    assert any(isinstance(item["piece"], list) for item in found), "bytes of a character that several tokens make"


def test_special_tokens_may_be_plain_text(client: TestClient) -> None:
    bos = client.get("/props").json()["bos_token"]
    assert len(client.post("/tokenize", json={"content": bos}).json()["tokens"]) == 1
    plain = client.post("/tokenize", json={"content": bos, "parse_special": False}).json()["tokens"]
    assert len(plain) > 1 and client.post("/detokenize", json={"tokens": plain}).json()["content"] == bos


def test_counts_are_those_of_the_answer(client: TestClient) -> None:
    usage = client.post("/v1/chat/completions", json=CHAT).json()["usage"]
    found = client.post("/v1/chat/completions/input_tokens", json=CHAT).json()
    assert found == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    body = {"input": "Hello there"}
    usage = client.post("/v1/responses", json=body | {"max_output_tokens": 2}).json()["usage"]
    found = client.post("/v1/responses/input_tokens", json=body).json()
    assert found["input_tokens"] == usage["input_tokens"]


def test_the_entry_of_a_model(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"][0]
    assert client.get(f"/v1/models/{listed['id']}").json() == listed
    assert client.get("/v1/models/another/one").status_code == 404


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_encoded_bodies(client: TestClient, encoding: str) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding]
    headers = {"content-encoding": encoding}
    data = pack(json.dumps(TEXT).encode())
    assert client.post("/completion", content=data, headers=headers).json()["content"] == " the room, and"


def test_encoded_bodies_that_cannot_be_read(client: TestClient) -> None:
    whole = gzip.compress(json.dumps(TEXT).encode())
    bomb = gzip.compress(bytes(65 << 20))
    cases = ((whole[:-9], "gzip", 400), (b"{}", "gzip", 400), (bomb, "gzip", 413), (b"{}", "br", 415))
    for data, encoding, status in cases:
        answer = client.post("/completion", content=data, headers={"content-encoding": encoding})
        assert answer.status_code == status, (encoding, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("options", "wanted"), [("", "|True"), ("--reasoning-effort none", "none|False")])
def test_the_effort_of_reasoning_has_a_default(options: str, wanted: str) -> None:
    template = "'{{ reasoning_effort }}|{{ enable_thinking }}'"
    with running(f"llama-server -m PUPPET -t 1 -c 512 -np 1 --chat-template {template} {options}") as client:
        assert client.post("/apply-template", json=CHAT).json() == {"prompt": wanted}
        low = client.post("/apply-template", json=CHAT | {"reasoning_effort": "low"}).json()
        assert low == {"prompt": "low|True"}
        answer = client.post("/apply-template", json=CHAT | {"reasoning_effort": None, "reasoning_format": None})
        assert answer.json() == {"prompt": wanted}, "null is as good as nothing"


def test_options_of_todays_llama_server() -> None:
    """Used, said to have no effect, or refused in one line; none is unknown."""
    params = parse(["--log-jsonl", "--reasoning-preserve", "--no-agent", "--sse-ping-interval", "-1"], "server", {})
    assert params.server.log_format == "json" and not params.warnings
    assert parse([], "server", {"LLAMA_ARG_LOG_JSONL": "0"}).server.log_format == "text"
    params = parse(["--tags", "a,b", "--video-fps", "2", "--cors-methods", "GET"], "server", {})
    assert [line.split("(")[0] for line in params.warnings] == [
        "no effect: --tags ",
        "no effect: --video-fps ",
        "no effect: --cors-methods ",
    ]
    for line, reason in (
        ("--kv-unified-per-slot 4096", "divided evenly by -np"),
        ("--fim-qwen-7b-default", "name the model with -hf"),
        ("--mcp-servers-config x.json", "clients call their tools themselves"),
    ):
        with pytest.raises(UsageError, match=reason):
            parse(line.split(), "server", {})


LONG = "The old man looked at the sea. " * 40
PROGRESS = {"stream": True, "return_progress": True, "n_predict": 2, "max_tokens": 2}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_progress_of_prompts(path: str) -> None:
    body = PROGRESS | ({"prompt": LONG} if "chat" not in path else {"messages": [{"role": "user", "content": LONG}]})
    with running("llama-server -m MODEL -t 1 -c 1024 -np 1 -b 64") as client:
        for cached in (False, True):
            events = [event["data"] for event in read_events(client.post(path, json=body).text)]
            found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
            done = [item["processed"] for item in found]
            assert done == sorted(done) and done[-1] == found[0]["total"] and done[0] == found[0]["cache"]
            assert len(done) == 1 + (1 if cached else -(-found[0]["total"] // 64))
            assert {item["cache"] for item in found} == {found[0]["total"] - 1 if cached else 0}
            times = [item["time_ms"] for item in found]
            assert times == sorted(times) and times[0] == 0 < times[1]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/completion", "/v1/chat/completions"])
def test_other_answers_have_no_progress(client: TestClient, path: str) -> None:
    body = {**PROGRESS, **CHAT, "prompt": "The", "input": "The"}
    if path in ("/completion", "/v1/chat/completions"):
        body["stream"] = False
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and "prompt_progress" not in answer.text
