"""EmbeddingGemma: states of random models against their definition, embeddings with and without the last matrices."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError, UsageError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_encoders import assert_states, unit
from tests.server import harness

N_LAYER, D, HEADS, KV, HEAD, F, WIDE = 7, 64, 3, 1, 32, 96, 160
WINDOW, BASE, WINDOW_BASE = 11, 1e5, 1e4
TOKENS = np.random.default_rng(23).integers(4, N_VOCAB, 37)


def new_model(seed: int, *, dense: bool = True, window: int = WINDOW, **keys: object) -> RandomModel:
    """dense: with matrices behind pooling."""
    known = {
        **checks.shape(N_LAYER, D, HEADS, KV, HEAD, F),
        **RMS,
        "rope.freq_base": BASE,
        "attention.sliding_window": window,
        "pooling_type": 1,
    }
    if dense:
        known |= {"dense_2_feat_in": D, "dense_2_feat_out": WIDE, "dense_3_feat_in": WIDE, "dense_3_feat_out": D}
    m = RandomModel("gemma-embedding", seed, **known | keys)
    checks.frame(m, D, tied=True)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name in "qk":
            m.norm(f"{p}.attn_{name}_norm", HEAD)
        m.ffn(p, D, F)
    if dense:
        m.matrix("dense_2", WIDE, D)
        m.matrix("dense_3", D, WIDE)
    return m


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, reach: int | None) -> np.ndarray:
    """Of q, k and v [T, H, d] of a text whose tokens see those at most `reach` positions away, or all: [T, H * d]."""
    i = np.arange(len(q))
    hidden = np.abs(i[:, None] - i) > (len(q) if reach is None else reach)
    out = np.empty_like(q)
    for h in range(q.shape[1]):
        kv = h * k.shape[1] // q.shape[1]
        scores = q[:, h] @ k[:, kv].T / math.sqrt(q.shape[2])
        out[:, h] = ref.softmax(np.where(hidden, -np.inf, scores)) @ v[:, kv]
    return out.reshape(len(q), -1)


def states(m: RandomModel, tokens: np.ndarray, full: tuple[int, ...] = (5,)) -> np.ndarray:
    """Normed states [T, D] of the last layer, float64; full: layers without a window."""
    e = Evaluation(m)
    x, pos = e.w["token_embd"][tokens] * math.sqrt(D), np.arange(len(tokens), dtype=np.float64)
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        angles = ref.plain_angles(HEAD, BASE if il in full else WINDOW_BASE, pos)
        q, k = (
            ref.rotate(ref.rms_norm(heads, w[f"attn_{name}_norm"], e.eps), angles, neox=True)
            for name, heads in (("q", q), ("k", k))
        )
        out = attended(q, k, v, None if il in full else m.keys["attention.sliding_window"] // 2)
        x = x + ref.rms_norm(e.output(il, out), w["post_attention_norm"], e.eps)
        branch = e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps), ref.gelu)
        x = x + ref.rms_norm(branch, w["post_ffw_norm"], e.eps)
    return ref.rms_norm(x, e.w["output_norm"], e.eps)


def gemma_embedding() -> tuple[RandomModel, np.ndarray]:
    """With the last matrices."""
    m = new_model(121)
    return m, states(m, TOKENS)


def embedding(m: RandomModel, found: np.ndarray) -> np.ndarray:
    """Of length 1, of states [T, D]."""
    vector = found.mean(axis=0)
    if "dense_2" in m.weights:
        vector = m.weights["dense_3"] @ (m.weights["dense_2"] @ vector)
    return unit(vector)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("window", [1, 10, 11, 64])
def test_states_are_those_of_the_definition(window: int, flash: bool, tmp_path: Path) -> None:
    """One text, some of its rows, and two texts in one batch that do not see each other."""
    model = new_model(122, window=window)
    params = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32", n_seq_max=2)
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), params)
    wanted, n = states(model, TOKENS), len(TOKENS)
    assert context.decode(Batch.single(TOKENS, logits="all")).shape[0] == 0, "an encoder has no logits"
    assert_states(context.embeddings, wanted, "one text")
    context.kv.clear()
    context.decode(Batch(TOKENS, np.arange(n), [(0,)] * n, np.arange(n) % 5 == 2))
    assert_states(context.embeddings, wanted[2::5], "some rows")
    context.kv.clear()
    pair = np.concatenate([TOKENS, TOKENS[::-1][:20]])
    pos = np.concatenate([np.arange(n), np.arange(20)])
    context.decode(Batch(pair, pos, [(0,)] * n + [(1,)] * 20, np.ones(n + 20, bool)))
    assert context.embeddings is not None
    assert_states(context.embeddings[:n], wanted, "first of two")
    assert_states(context.embeddings[n:], states(model, TOKENS[::-1][:20]), "second of two")


def test_keys_of_windows(tmp_path: Path) -> None:
    """A period as a number, a flag per layer, another RoPE base."""
    settings = ContextParams(n_ctx=64, n_threads=1, type_k="f32", type_v="f32")
    flags = [False, True, True, False, True, True, True]
    for pattern, full in ((3, (2, 5)), (flags, (0, 3)), (1, tuple(range(N_LAYER))), (0, ())):
        model = new_model(123, **{"attention.sliding_window_pattern": pattern})
        context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
        context.decode(Batch.single(TOKENS, logits="all"))
        assert_states(context.embeddings, states(model, TOKENS, full), str(pattern))
    model = new_model(124, **{"rope.freq_base_swa": BASE})
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    context.decode(Batch.single(TOKENS, logits="all"))
    found = context.embeddings
    assert found is not None and np.abs(found - states(model, TOKENS)).max() > 0.01


@pytest.mark.parametrize("dense", [True, False])
def test_embeddings(dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(125, dense=dense)
    path = model.write(tmp_path / "model.gguf")
    llm = ikpy.LLM(path, n_threads=1, type_k="f32", type_v="f32")
    texts = ["word5 word77 word8", "word9", " ".join(f"word{i}" for i in range(30, 60))]
    tokens = [np.array(llm.tokenize(text, add_special=True)) for text in texts]
    wanted = np.stack([embedding(model, states(model, ids)) for ids in tokens])
    np.testing.assert_allclose(llm.embed(texts), wanted, atol=2e-5)
    assert_states(llm.token_embeddings(texts[0]), states(model, tokens[0]), "states")
    with pytest.raises(UsageError, match="embeds texts and writes none"):
        llm.generate("word5")
    monkeypatch.setitem(harness.MODELS, "ENCODER", str(path))
    with harness.running("llama-server -m ENCODER -t 1 -c 768 -np 2 -b 256 -ub 256 --embeddings") as client:
        answer = client.post("/v1/embeddings", json={"input": texts}).json()
        np.testing.assert_allclose([item["embedding"] for item in answer["data"]], wanted, atol=4e-3)
        few = client.post("/v1/embeddings", json={"input": texts[0], "dimensions": 16}).json()
        np.testing.assert_allclose(few["data"][0]["embedding"], unit(wanted[0, :16]), atol=8e-3)


def test_what_cannot_be(tmp_path: Path) -> None:
    for lost, message in (
        ("dense_2", "tensor 'dense_2.weight' not found"),
        ("dense_3", "tensor 'dense_3.weight' not found"),
    ):
        model = new_model(126)
        del model.weights[lost]
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))
    model = new_model(127)
    model.matrix("dense_2", WIDE, D + 1)
    with pytest.raises(IkpyError, match=r"tensor 'dense_2\.weight' has wrong shape"):
        Model.load(model.write(tmp_path / "model.gguf"))
    context = Context(Model.load(new_model(128).write(tmp_path / "model.gguf")), ContextParams(n_ctx=64, n_ubatch=16))
    with pytest.raises(UsageError, match="37 tokens that see each other must fit one micro-batch of 16"):
        context.decode(Batch.single(TOKENS, logits="all"))
    assert not context.kv.can_shift


def test_quantized(tmp_path: Path) -> None:
    model = new_model(129)
    assert quantize([str(model.write(tmp_path / "model.gguf")), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        assert {file.tensors[f"{name}.weight"].type_id for name in ("dense_2", "dense_3")} == {0}
    llm = ikpy.LLM(tmp_path / "small.gguf", n_threads=1, repack=True)
    text = "word5 word77 word8"
    wanted = embedding(model, states(model, np.array(llm.tokenize(text, add_special=True))))
    assert llm.embed(text)[0] @ wanted > 0.999
