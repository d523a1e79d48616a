"""`echo` and `logprobs` of /v1/completions: texts that are repeated and scored, as evaluation programs want them."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.params import ContextParams
from ikpy.server.build import Server
from ikpy.server.tasks import TokenProbability
from ikpy.server.token_lists import TokenLists, prompt_pieces
from ikpy.tools.perplexity import perplexity, plan_perplexity
from tests.server.harness import MODELS, loaded, read_events, start_server

TEXT = "The old man looked at the sea, and the house behind him was dark. Nobody had ever seen it so."
LONG = " ".join([TEXT, "A girl of seven ran along the road; they spoke of bread, water and a letter.", TEXT] * 4)
LISTS = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = start_server("llama-server -m MODEL -t 1 -c 2048 -np 4 -ub 64 --context-shift on")
    yield found
    found.engine.stop(10)


@pytest.fixture
def client(server: Server) -> TestClient:
    return TestClient(server.app, raise_server_exceptions=False)


def ask(client: TestClient, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1} | more
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_scores_are_those_of_perplexity(client: TestClient) -> None:
    vocab, model = loaded(MODELS["MODEL"]).vocab, loaded(MODELS["MODEL"]).model
    n_ctx = 128
    tokens = vocab.tokenize(LONG)
    assert len(tokens) >= 2 * n_ctx
    context = Context(model, ContextParams(n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=64, n_threads=1))
    out = io.StringIO()
    result = perplexity(context, vocab, LONG, plan_perplexity(n_ctx, n_ctx), out=out, log=out)
    chunks = [tokens[i * n_ctx : (i + 1) * n_ctx] for i in range(result.n_chunks)]
    if vocab.add_bos:
        chunks = [[vocab.bos, *chunk[1:]] for chunk in chunks]
    choices = ask(client, chunks, logprobs=0)["choices"]
    losses: list[float] = []
    for choice, running in zip(choices, result.running, strict=True):
        losses += choice["logprobs"]["token_logprobs"][n_ctx // 2 + 1 :]
        ppl = math.exp(-sum(losses) / len(losses))
        assert ppl == pytest.approx(running, rel=1e-6), f"after {len(losses)} tokens"


@pytest.mark.parametrize("n", [0, 1, 5])
def test_every_token_has_the_probability_of_the_softmax(client: TestClient, n: int) -> None:
    """A text of several micro-batches against one evaluation whose logits are all kept."""
    session = loaded(MODELS["MODEL"])
    tokens = session.vocab.tokenize(LONG)[:200]
    context = Context(session.model, ContextParams(n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1))
    rows = []
    for start in range(0, len(tokens), 64):
        part = tokens[start : start + 64]
        rows.append(
            context.decode(Batch(part, range(start, start + len(part)), [(0,)] * len(part), [True] * len(part)))
        )
    logits = np.concatenate(rows).astype(np.float64)
    wanted = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    found = ask(client, tokens, logprobs=n)["choices"][0]["logprobs"]
    assert list(found) == LISTS and all(len(found[name]) == len(tokens) for name in LISTS)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    worst = 0.0
    for i, token in enumerate(tokens[1:], 1):
        own = found["token_logprobs"][i]
        worst = max(worst, abs(own - wanted[i - 1, token]))
        top = found["top_logprobs"][i]
        best = np.sort(wanted[i - 1])[::-1][:n]
        values = sorted(top.values(), reverse=True)
        assert values[:n] == pytest.approx(best, abs=2e-4), i
        assert own in values and len(values) in (n, n + 1), i
    print(f"largest difference of a log probability: {worst:.2g}")
    assert worst < 2e-4


def test_the_text_is_repeated_before_the_answer(client: TestClient) -> None:
    plain = ask(client, TEXT, max_tokens=6, echo=False, logprobs=None)["choices"][0]["text"]
    found = ask(client, TEXT, max_tokens=6, logprobs=2)
    choice = found["choices"][0]
    assert choice["text"] == TEXT + plain
    assert found["usage"]["completion_tokens"] == 6
    lists = choice["logprobs"]
    n = found["usage"]["prompt_tokens"]
    assert {len(lists[name]) for name in LISTS} == {n + 6}
    for token, start in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        assert choice["text"][start : start + len(token)] == token
    drawn = list(zip(lists["token_logprobs"][n:], lists["top_logprobs"][n:], strict=True))
    assert all(own == max(top.values()) for own, top in drawn), "greedy tokens are the most probable ones"
    alone = ask(client, TEXT, max_tokens=6, echo=False, logprobs=2)["choices"][0]["logprobs"]
    assert list(alone) == ["content", *LISTS]
    assert alone["tokens"] == lists["tokens"][n:]
    assert alone["token_logprobs"] == pytest.approx(lists["token_logprobs"][n:], abs=1e-3)
    assert [len(TEXT) + start for start in alone["text_offset"]] == lists["text_offset"][n:]


def test_echo_alone_repeats_the_text(client: TestClient) -> None:
    choice = ask(client, TEXT, logprobs=None)["choices"][0]
    assert choice == {"text": TEXT, "index": 0, "logprobs": None, "finish_reason": "length"}
    vocab = loaded(MODELS["MODEL"]).vocab
    assert ask(client, vocab.tokenize(TEXT), logprobs=None)["choices"][0]["text"] == TEXT


def test_an_end_token_is_one_of_the_answer(client: TestClient) -> None:
    """Programs that ask for one token leave out the last of the lists, whatever it is."""
    eos = loaded(MODELS["MODEL"]).vocab.eos
    found = ask(client, TEXT, max_tokens=1, logit_bias={str(eos): 100})
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert {len(choice["logprobs"][name]) for name in LISTS} == {found["usage"]["prompt_tokens"] + 1}
    assert choice["logprobs"]["text_offset"][-1] == len(TEXT)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_several_prompts_and_answers(client: TestClient, as_tokens: bool) -> None:
    texts = [TEXT, "Nobody had ever", LONG, "The old man looked at the"]
    vocab = loaded(MODELS["MODEL"]).vocab
    prompts: Any = [vocab.tokenize(text) for text in texts] if as_tokens else texts
    alone = [ask(client, prompt, max_tokens=2)["choices"][0] for prompt in prompts]
    both = ask(client, prompts, max_tokens=2, n=2)["choices"]
    assert [choice["index"] for choice in both] == list(range(8))
    for i, choice in enumerate(both):
        want = alone[i // 2]
        assert choice["text"] == want["text"]
        assert choice["logprobs"]["tokens"] == want["logprobs"]["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            want["logprobs"]["token_logprobs"][1:], abs=1e-3
        )


def test_cached_text_is_scored_too(client: TestClient) -> None:
    first, second = (ask(client, TEXT)["choices"][0]["logprobs"]["token_logprobs"] for _ in range(2))
    assert second[1:] == pytest.approx(first[1:], abs=1e-6)


def test_logits_of_one_micro_batch_are_there_at_a_time(
    server: Server, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside answers that are written, too."""
    decode, sizes, begun = server.engine.context.decode, [], threading.Event()

    def counted(batch: Any, *, copy: bool) -> Any:
        rows = decode(batch, copy=copy)
        sizes.append((len(batch), len(rows)))
        begun.set()
        return rows

    monkeypatch.setattr(server.engine.context, "decode", counted)
    writing = threading.Thread(target=ask, args=(client, "One"), kwargs={"max_tokens": 60, "echo": False})
    writing.start()
    assert begun.wait(60)
    tokens = len(ask(client, [LONG, LONG[5:]])["choices"][0]["logprobs"]["tokens"])
    writing.join(60)
    assert tokens > 200
    assert max(n for n, _ in sizes) <= 64 and max(n for _, n in sizes) > 32, sizes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stream": True}, "echo with logprobs is not streamed"),
        ({"logprobs": 101}, "logprobs must be between 0 and 100 with echo, not 101"),
        ({"logprobs": -1}, "logprobs must be between 0 and 100 with echo, not -1"),
        ({"post_sampling_probs": True}, "no probabilities after sampling"),
        ({"post_sampling_probs": True, "logprobs": None, "n_probs": 2}, "no probabilities after sampling"),
        ({"prompt": LONG * 3}, "exceeds the available context size"),
    ],
)
def test_what_cannot_be_scored_is_refused(client: TestClient, more: dict[str, Any], message: str) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1} | more
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_fields_that_change_nothing_are_accepted(client: TestClient) -> None:
    """Clients send them with their default values."""
    body = {"prompt": "One", "max_tokens": 1, "n": 2}
    for more, status in (({"best_of": 2, "suffix": ""}, 200), ({"best_of": 3}, 400), ({"suffix": "x"}, 400)):
        assert client.post("/v1/completions", json=body | more).status_code == status, more


def test_streams_begin_with_the_text(client: TestClient) -> None:
    body = {"prompt": [TEXT, "One"], "n": 2, "max_tokens": 4, "temperature": 0, "echo": True}
    whole = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    events = read_events(client.post("/v1/completions", json=body | {"stream": True}).text)
    texts = ["", "", "", ""]
    for event in events[:-1]:
        choice = event["data"]["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == whole and [text[:3] for text in texts] == ["The", "The", "One", "One"]


def test_streamed_lists_go_on_where_the_last_ended(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    events = read_events(client.post("/v1/completions", json=body | {"stream": True}).text)
    parts = [c["logprobs"] for e in events[:-1] if (c := e["data"]["choices"][0])["logprobs"]]
    assert len(parts) > 1
    for name in ("tokens", "text_offset"):
        assert [item for part in parts for item in part[name]] == whole[name]


class Letters:
    """A vocabulary of the sentencepiece kind."""

    kind, add_bos, add_space_prefix, bos, eog = "spm", True, True, 1, frozenset({2})
    pieces = (b"?", b"<s>", b"</s>", b" The", b" sea", b"\xe6", b"\x97\xa5", b"<x>", b" a")

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        return b"" if token in (1, 2, 7) and not special else self.pieces[token]


def test_offsets_are_characters_of_the_text() -> None:
    vocab: Any = Letters()
    tokens = [1, 3, 5, 6, 7, 8, 4]
    pieces = prompt_pieces(vocab, tokens)
    assert b"".join(pieces).decode() == "The日<x>a sea"
    found = [TokenProbability(token, 0.5, ()) for token in tokens[1:]]
    lists = TokenLists(vocab, 0, special=False)
    assert lists.add_prompt(tokens, pieces, found)["text_offset"] == [0, 0, 3, 3, 4, 7, 8]
    assert lists.add([TokenProbability(4, 0.5, ()), TokenProbability(2, 0.5, ())])["text_offset"] == [12, 16]
    assert prompt_pieces(vocab, [3, 4]) == [b"The", b" sea"]


def test_tokens_with_one_text_are_the_most_probable_one() -> None:
    vocab: Any = Letters()
    item = TokenProbability(8, 0.1, ((8, 0.5), (4, 0.3)))
    top = TokenLists(vocab, 2, special=False).add([item])["top_logprobs"][0]
    assert top == {" a": math.log(0.5), " sea": math.log(0.3)}
