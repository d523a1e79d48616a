"""bert and nomic-bert: hidden states of random models against their definition in float64, pooling, embeddings."""

from __future__ import annotations

import math
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, UsageError
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.server import harness
from tests.shared import SHARED

LENGTH = 33
TOKENS = np.random.default_rng(21).integers(4, N_VOCAB, LENGTH)
WORDS = ["the", "old", "man", "sea", "and", "boat"]
erf = np.vectorize(math.erf)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def norm_with_bias(m: RandomModel, name: str, d: int) -> None:
    m.norm(name, d)
    m.vector(f"{name}.bias", d)


def make(
    arch: str, seed: int, n: int, d: int, heads: int, f: int, *, fused: bool, biases: bool, **keys: object
) -> RandomModel:
    """A random encoder."""
    m = RandomModel(
        arch,
        seed,
        **{
            "block_count": n,
            "embedding_length": d,
            "attention.head_count": heads,
            "feed_forward_length": f,
            "attention.layer_norm_epsilon": 1e-6,
            "context_length": 64,
            **keys,
        },
    )
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, d)
    m.matrix("token_types", 2, d)
    if arch == "bert":
        m.matrix("position_embd", 64, d)
    norm_with_bias(m, "token_embd_norm", d)
    for il in range(n):
        p = f"blk.{il}"
        if fused:
            m.matrix(f"{p}.attn_qkv", 3 * d, d)
            if biases:
                m.vector(f"{p}.attn_qkv.bias", 3 * d)
        else:
            for name in "qkv":
                m.matrix(f"{p}.attn_{name}", d, d)
                if biases:
                    m.vector(f"{p}.attn_{name}.bias", d)
        m.matrix(f"{p}.attn_output", d, d)
        for name, rows, columns in (("up", f, d), ("down", d, f), *((("gate", f, d),) if arch == "nomic-bert" else ())):
            m.matrix(f"{p}.ffn_{name}", rows, columns)
        if biases:
            m.vector(f"{p}.attn_output.bias", d)
            m.vector(f"{p}.ffn_up.bias", f)
            m.vector(f"{p}.ffn_down.bias", d)
        norm_with_bias(m, f"{p}.attn_output_norm", d)
        norm_with_bias(m, f"{p}.layer_output_norm", d)
    return m


def states(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """Hidden states [T, D] by the definition, float64."""
    w = {name: value.astype(np.float64) for name, value in m.weights.items()}
    d, heads = m.keys["embedding_length"], m.keys["attention.head_count"]
    head, pos = d // heads, np.arange(len(tokens), dtype=np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return ref.layer_norm(x, w[name], 1e-6) + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name].T + w.get(f"{name}.bias", 0.0)

    x = w["token_embd"][tokens] + w["token_types"][0]
    if m.arch == "bert":
        x = x + w["position_embd"][: len(tokens)]
    x = norm(x, "token_embd_norm")
    for il in range(m.keys["block_count"]):
        p = f"blk.{il}"
        if f"{p}.attn_qkv" in w:
            q, k, v = np.split(linear(x, f"{p}.attn_qkv"), 3, axis=1)
        else:
            q, k, v = (linear(x, f"{p}.attn_{name}") for name in "qkv")
        q, k, v = (t.reshape(-1, heads, head) for t in (q, k, v))
        if m.arch == "nomic-bert":
            angles = ref.plain_angles(head, m.keys["rope.freq_base"], pos)
            q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        out = np.empty_like(q)
        for h in range(heads):
            out[:, h] = ref.softmax(q[:, h] @ k[:, h].T / math.sqrt(head)) @ v[:, h]
        x = norm(x + linear(out.reshape(len(tokens), d), f"{p}.attn_output"), f"{p}.attn_output_norm")
        hidden = linear(x, f"{p}.ffn_up")
        hidden = ref.silu(linear(x, f"{p}.ffn_gate")) * hidden if m.arch == "nomic-bert" else gelu(hidden)
        x = norm(x + linear(hidden, f"{p}.ffn_down"), f"{p}.layer_output_norm")
    return x


MODELS = {
    "bert": lambda: make("bert", 1, 3, 96, 3, 200, fused=False, biases=True, pooling_type=2),
    "bert-fused": lambda: make("bert", 2, 2, 64, 4, 132, fused=True, biases=True, pooling_type=1),
    "bert-no-bias": lambda: make("bert", 3, 2, 72, 3, 40, fused=False, biases=False),
    "nomic": lambda: make(
        "nomic-bert", 4, 3, 96, 3, 160, fused=True, biases=False, pooling_type=1, **{"rope.freq_base": 1000.0}
    ),
    "nomic-bias": lambda: make("nomic-bert", 5, 2, 64, 2, 76, fused=True, biases=True, **{"rope.freq_base": 10000.0}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RandomModel, Path]]:
    folder = tmp_path_factory.mktemp("encoders")
    models = {name: build() for name, build in MODELS.items()}
    return {name: (m, m.write(folder / f"{name}.gguf")) for name, m in models.items()}


def assert_states(found: np.ndarray | None, wanted: np.ndarray, what: str, bound: float = 2e-5) -> None:
    assert found is not None
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() < bound, f"{what}: token {error.argmax()} off by {error.max():.1e} relative"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("flash", [True, False])
def test_states_are_those_of_the_definition(name: str, flash: bool, files: dict) -> None:
    """One text; some of its rows; two texts of different length in one batch, which do not see each other."""
    model, path = files[name]
    params = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32", n_seq_max=2)
    ctx = Context(Model.load(path), params)
    wanted = states(model, TOKENS)
    logits = ctx.decode(Batch.single(TOKENS, logits="all"))
    assert logits.shape[0] == 0, "an encoder has no logits"
    assert_states(ctx.embeddings, wanted, "one text")
    ctx.kv.clear()
    ctx.decode(Batch(TOKENS, np.arange(LENGTH), [(0,)] * LENGTH, np.arange(LENGTH) % 5 == 2))
    assert_states(ctx.embeddings, wanted[2::5], "some rows")
    ctx.kv.clear()
    n = 20
    pair = np.concatenate([TOKENS, TOKENS[::-1][:n]])
    pos = np.concatenate([np.arange(LENGTH), np.arange(n)])
    ctx.decode(Batch(pair, pos, [(0,)] * LENGTH + [(1,)] * n, np.ones(LENGTH + n, bool)))
    assert ctx.embeddings is not None
    assert_states(ctx.embeddings[:LENGTH], wanted, "first of two")
    assert_states(ctx.embeddings[LENGTH:], states(model, TOKENS[::-1][:n]), "second of two")


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


def test_embed_pools_as_the_file_says(files: dict) -> None:
    """Begin and end tokens around the words, every pooling, the default of the file."""
    for name, default in (("bert", "cls"), ("nomic", "mean"), ("bert-no-bias", "mean")):
        model, path = files[name]
        llm = ikpy.LLM(path, n_threads=1, type_k="f32", type_v="f32")
        tokens = llm.tokenize("The old man", add_special=True)
        assert tokens == [2, 4, 5, 6, 3]
        wanted = states(model, np.array(tokens))
        assert_states(llm.token_embeddings("the old man"), wanted, name)
        pooled = {"mean": wanted.mean(axis=0), "cls": wanted[0], "last": wanted[-1]}
        assert llm.pooling == default
        for pooling, vector in pooled.items():
            found = llm.embed(["the old man", "the sea"], pooling=pooling)
            assert found.shape == (2, len(vector))
            np.testing.assert_allclose(found[0], unit(vector), atol=2e-5)
        np.testing.assert_allclose(llm.embed("the old man")[0], unit(pooled[default]), atol=2e-5)
        with pytest.raises(UsageError, match=r"pooling 'rank' needs a model with a classification head"):
            llm.embed("the sea", pooling="rank")
        with pytest.raises(UsageError, match="token_embeddings gives a state per token"):
            llm.embed("the sea", pooling="none")
        with pytest.raises(UsageError, match=f"architecture '{model.arch}' embeds texts and writes none"):
            llm.generate("the sea")


def test_classification_head(tmp_path: Path) -> None:
    """Pooling "rank": a dense layer with tanh and an output layer on the first state; either may be missing."""
    for seed, (dense, classes) in enumerate([(True, 1), (True, 3), (False, 2), (True, 0)]):
        model = make("bert", 10 + seed, 2, 64, 2, 96, fused=False, biases=True, pooling_type=4)
        if dense:
            model.matrix("cls", 64, 64)
            model.vector("cls.bias", 64)
        if classes:
            model.matrix("cls.output", classes, 64)
            model.vector("cls.output.bias", classes)
        llm = ikpy.LLM(model.write(tmp_path / f"{seed}.gguf"), n_threads=1)
        x = states(model, np.array(llm.tokenize("the boat", add_special=True)))[0]
        w = {name: value.astype(np.float64) for name, value in model.weights.items()}
        if dense:
            x = np.tanh(w["cls"] @ x + w["cls.bias"])
        if classes:
            x = w["cls.output"] @ x + w["cls.output.bias"]
        found = llm.embed(["the boat", "the sea"])
        assert found.shape == (2, len(x)) and llm.pooling == "rank"
        np.testing.assert_allclose(found[0], x, atol=2e-3)


def test_limits_are_named(files: dict, tmp_path: Path) -> None:
    _, path = files["bert"]
    ctx = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, n_ubatch=32))
    with pytest.raises(UsageError, match="33 tokens that see each other must fit one micro-batch of 32"):
        ctx.decode(Batch.single(TOKENS, logits="all"))
    with pytest.raises(UsageError, match="position 64 is too large: the model has embeddings for 64 positions"):
        ctx.decode(Batch.single(TOKENS[:1], 64))
    assert not ctx.kv.can_shift
    broken = make("bert", 9, 2, 64, 2, 96, fused=False, biases=True, pooling_type=9)
    with pytest.raises(FileFormatError, match=r"unknown bert\.pooling_type 9"):
        Model.load(broken.write(tmp_path / "broken.gguf"))


def test_server_embeds_with_an_encoder(files: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several texts at once give what each gives alone; completions are refused."""
    _, path = files["nomic"]
    monkeypatch.setitem(harness.MODELS, "ENCODER", str(path))
    llm = ikpy.LLM(path, n_threads=1)
    texts = ["the old man", "sea", "the boat and the sea and the man and the boat", "old"] * 3
    with harness.running("llama-server -m ENCODER -t 1 -c 192 -np 3 -b 24 -ub 24 --embeddings") as client:
        answer = client.post("/v1/embeddings", json={"input": texts}).json()
        found = np.array([item["embedding"] for item in answer["data"]])
        np.testing.assert_allclose(found, llm.embed(texts), atol=2e-3)
        long = client.post("/v1/embeddings", json={"input": "the " * 40})
        assert long.status_code == 400 and "input is too large to process" in long.json()["error"]["message"]
        refused = client.post("/completion", json={"prompt": "the"})
        assert refused.status_code == 501 and "embeds texts and writes none" in refused.json()["error"]["message"]


def test_long_texts_do_not_wait_for_short_ones(files: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that fills a micro-batch comes to its turn while others send short ones without end."""
    monkeypatch.setitem(harness.MODELS, "ENCODER", str(files["nomic"][1]))
    with harness.running("llama-server -m ENCODER -t 1 -c 192 -np 3 -b 24 -ub 24 --embeddings") as client:
        short = threading.Thread(target=lambda: client.post("/v1/embeddings", json={"input": ["sea"] * 4000}))
        short.start()
        while short.is_alive() and client.get("/health").json()["slots_idle"]:
            pass
        began = time.perf_counter()
        long = client.post("/v1/embeddings", json={"input": "the " * 20}).json()
        waited = time.perf_counter() - began
        short.join()
        assert long["usage"]["prompt_tokens"] > 18
        # Without its turn it would wait for nearly all of the others.
        assert waited < 0.75 * (time.perf_counter() - began)


def test_tools_that_need_logits_refuse(files: dict, capsys: pytest.CaptureFixture[str]) -> None:
    from ikpy.cli import main

    for arguments in (["cli", "-p", "x"], ["server", "--port", "0"]):
        assert main([*arguments, "-m", str(files["bert"][1]), "-t", "1"]) == 1
        err = capsys.readouterr().err
        assert re.search(
            r"error: a model of architecture 'bert' embeds texts only: (use ikpy server|add --embeddings)", err
        )


def test_published_vocabulary_of_bert() -> None:
    """The encoder's begin and end tokens are [CLS] and [SEP]."""
    from ikpy.gguf.reader import GGUFFile
    from ikpy.vocab import Vocab

    path = SHARED / "public" / "vocab" / "ggml-vocab-bert-bge.gguf"
    if not path.exists():
        pytest.skip("the shared vocabulary files are absent")
    with GGUFFile.open(path) as file:
        vocab = Vocab.from_metadata(file.metadata)
    tokens = vocab.tokenize("hello world", add_special=True)
    assert tokens == [101, 7592, 2088, 102]
