"""Prompts of models with an encoder and a decoder: answers are those of the definition, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.models.t5_models import T5Evaluation, new_t5
from tests.server import harness

START, N = 3, 12
TEXTS = ["the old man", "the old man and the sea", "sea", "man sea old the and a boat", "the old man"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, T5Evaluation]:
    made = new_t5("t5", 71, n_decoder=2, decoder_start_token_id=START, decoder_block_count=2)
    return made.write(tmp_path_factory.mktemp("t5") / "model.gguf"), T5Evaluation(made)


@pytest.fixture
def client(model: tuple[Path, T5Evaluation], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(harness.MODELS, "T5", str(model[0]))
    options = "-t 1 -c 512 -np 2 -b 128 -ub 32 -ctk f32 -ctv f32"
    with harness.running(f"llama-server -m T5 {options}") as running:
        yield running


def greedy(e: T5Evaluation, ids: list[int]) -> list[int]:
    answer = [START]
    for _ in range(N):
        answer.append(int(np.argmax(e.logits(np.array(ids), np.array(answer))[-1])))
    return answer[1:]


def completed(client: Any, **body: Any) -> Any:
    settings = {"n_predict": N, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return client.post("/completion", json={**settings, **body})


def test_answers(client: Any, model: tuple[Path, T5Evaluation]) -> None:
    """One after the other, all at once in two slots, several of one prompt, of ids as well as of texts."""
    ids = [client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"] for text in TEXTS]
    wanted = [greedy(model[1], each) for each in ids]
    for text, tokens in zip(TEXTS, wanted, strict=True):
        answer = completed(client, prompt=text).json()
        assert answer["tokens"] == tokens, text
        assert answer["tokens_evaluated"] == len(ids[TEXTS.index(text)]) + 1
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(lambda prompt: completed(client, prompt=prompt).json()["tokens"], ids))
    assert found == wanted
    body = {"prompt": TEXTS[1], "max_tokens": N, "temperature": 0, "n": 2, "ignore_eos": True}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert (
        len(choices) == 2
        and choices[0]["text"] == choices[1]["text"] == completed(client, prompt=TEXTS[1]).json()["content"]
    )


def test_drafts_change_nothing(model: tuple[Path, T5Evaluation], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness.MODELS, "T5", str(model[0]))
    options = "-t 1 -c 256 -ctk f32 -ctv f32 --spec-type ngram-simple"
    with harness.running(f"llama-server -m T5 {options}") as running:
        for text in TEXTS:
            tokens = running.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
            assert completed(running, prompt=text).json()["tokens"] == greedy(model[1], tokens)


def test_requests_that_cannot_be(client: Any) -> None:
    """Each is told so, and the next one is served."""
    long = completed(client, prompt=" ".join(["man"] * 40))
    assert long.status_code == 400 and "do not fit a micro-batch of 32: raise -ub" in long.text
    scored = client.post("/v1/completions", json={"prompt": "sea", "max_tokens": 1, "echo": True, "logprobs": 1})
    assert scored.status_code == 400 and "have no probabilities" in scored.text
    assert client.post("/v1/embeddings", json={"input": "sea"}).status_code >= 400
    assert completed(client, prompt="sea").status_code == 200


def test_conversations(client: Any) -> None:
    body = {"messages": [{"role": "user", "content": "sea"}], "max_tokens": 3, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 or "micro-batch" in answer.text
    assert "media_marker" not in client.get("/props").json()
