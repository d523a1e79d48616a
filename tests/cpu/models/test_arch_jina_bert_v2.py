"""jina-bert-v2 and neo-bert: states of random models against their definition, heads of rerankers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.engine.model import Model
from ikpy.errors import IkpyError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.encoder_checks import check_embeddings, check_states
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_encoders import WORDS, gelu, norm_with_bias

HEADS, HEAD, F, EPS, N_LAYER = 6, 16, 160, 2e-3, 3
D = HEADS * HEAD
TOKENS = np.random.default_rng(26).integers(4, N_VOCAB, 35)
Made = tuple[RandomModel, np.ndarray]


def new_jina(seed: int, *, network: str = "gated", code: bool = False, **keys: Any) -> RandomModel:
    """network: "gated" (gate and up apart), "fused" or "plain"; code: with the norms of models of code."""
    usual = {
        "block_count": N_LAYER,
        "embedding_length": D,
        "attention.head_count": HEADS,
        "feed_forward_length": F,
        "attention.layer_norm_epsilon": EPS,
        "attention.causal": False,
        "pooling_type": 1,
    }
    m = RandomModel("jina-bert-v2", seed, **usual | keys)
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, D)
    m.matrix("token_types", 2, D)
    norm_with_bias(m, "token_embd_norm", D)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        for name in ("q", "k", "v", "output"):
            m.matrix(f"{p}.attn_{name}", D, D)
            m.vector(f"{p}.attn_{name}.bias", D)
        for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2") if code else ():
            norm_with_bias(m, f"{p}.{name}", D)
        if network == "gated":
            m.matrix(f"{p}.ffn_gate", F, D)
        m.matrix(f"{p}.ffn_up", 2 * F if network == "fused" else F, D)
        if network == "plain":
            m.vector(f"{p}.ffn_up.bias", F)
        m.matrix(f"{p}.ffn_down", D, F)
        m.vector(f"{p}.ffn_down.bias", D)
        norm_with_bias(m, f"{p}.attn_output_norm", D)
        norm_with_bias(m, f"{p}.layer_output_norm", D)
    return m


def biased_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Every token sees all, by distance less."""
    return ref.attend(q, k, v, 1 / math.sqrt(HEAD), max_bias=8.0, causal=False)


def jina_states(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """States [T, D], float64."""
    e = Evaluation(m)

    def norm(x: np.ndarray, w: ref.Weights, name: str) -> np.ndarray:
        return ref.layer_norm(x, w[name], EPS) + w[f"{name}.bias"]

    def linear(x: np.ndarray, w: ref.Weights, name: str) -> np.ndarray:
        return x @ w[name].T + w.get(f"{name}.bias", 0.0)

    x = norm(e.w["token_embd"][tokens] + e.w["token_types"][0], e.w, "token_embd_norm")
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        q, k, v = (linear(x, w, f"attn_{name}") for name in "qkv")
        if "attn_q_norm" in w:
            q, k = norm(q, w, "attn_q_norm"), norm(k, w, "attn_k_norm")
        q, k, v = (t.reshape(len(x), HEADS, HEAD) for t in (q, k, v))
        h = norm(x + linear(biased_attention(q, k, v), w, "attn_output"), w, "attn_output_norm")
        h = norm(x + h, w, "attn_norm_2") if "attn_norm_2" in w else h
        up = linear(h, w, "ffn_up")
        if "ffn_gate" in w:
            hidden = gelu(linear(h, w, "ffn_gate")) * up
        else:
            hidden = gelu(up) if up.shape[1] == F else gelu(up[:, :F]) * up[:, F:]
        x = norm(h + linear(hidden, w, "ffn_down"), w, "layer_output_norm")
    return x


def new_neo(seed: int, **keys: Any) -> RandomModel:
    usual = checks.shape(N_LAYER, D, HEADS, HEADS, HEAD, F)
    m = RandomModel("neo-bert", seed, **usual | checks.RMS | {"attention.causal": False, "pooling_type": 2} | keys)
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("enc.output_norm", D)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.matrix(f"{p}.attn_qkv", 3 * D, D)
        m.matrix(f"{p}.attn_output", D, D)
        m.norm(f"{p}.ffn_norm", D)
        m.matrix(f"{p}.ffn_up", 2 * F, D)
        m.matrix(f"{p}.ffn_down", D, F)
    return m


def neo_states(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """Normed states [T, D], float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][tokens]
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps) @ w["attn_qkv"].T
        q, k, v = (part.reshape(-1, HEADS, HEAD) for part in np.split(h, 3, axis=1))
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + ref.attend(q, k, v, 1 / math.sqrt(HEAD), causal=False) @ w["attn_output"].T
        gate, up = np.split(ref.rms_norm(x, w["ffn_norm"], e.eps) @ w["ffn_up"].T, 2, axis=1)
        x = x + (ref.silu(gate) * up) @ w["ffn_down"].T
    return ref.rms_norm(x, e.w["enc.output_norm"], e.eps)


def jina() -> Made:
    m = new_jina(231)
    return m, jina_states(m, TOKENS)


def jina_fused() -> Made:
    m = new_jina(232, network="fused")
    return m, jina_states(m, TOKENS)


def jina_plain() -> Made:
    m = new_jina(233, network="plain")
    return m, jina_states(m, TOKENS)


def jina_code() -> Made:
    m = new_jina(234, code=True)
    return m, jina_states(m, TOKENS)


def neo() -> Made:
    m = new_neo(235)
    return m, neo_states(m, TOKENS)


MODELS = [jina, jina_fused, jina_plain, jina_code, neo]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_states_are_those_of_the_definition(make: Callable[[], Made], flash: bool, tmp_path: Path) -> None:
    model, wanted = make()
    check_states(model, TOKENS, wanted, tmp_path, flash=flash)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_embeddings(make: Callable[[], Made], tmp_path: Path) -> None:
    model = make()[0]
    check_embeddings(model, tmp_path, first=model.arch == "neo-bert")


@pytest.mark.parametrize("n_rows", [D, 1])
def test_head_of_rerankers(n_rows: int, tmp_path: Path) -> None:
    """Of Jina the published one: tanh(dense), output; or the one row of files without output."""
    model = new_jina(236, pooling_type=4)
    model.matrix("cls", n_rows, D)
    model.vector("cls.bias", n_rows)
    if n_rows == D:
        model.matrix("cls.output", 1, D)
        model.vector("cls.output.bias", 1)
    llm = ikpy.LLM(model.write(tmp_path / "model.gguf"), n_threads=1, type_k="f32", type_v="f32")
    states = jina_states(model, np.array(llm.tokenize("the boat", add_special=True)))
    w = {name: value.astype(np.float64) for name, value in model.weights.items()}
    wanted = np.tanh(w["cls"] @ states[0] + w["cls.bias"])
    wanted = w["cls.output"] @ wanted + w["cls.output.bias"] if n_rows == D else wanted
    np.testing.assert_allclose(llm.embed("the boat")[0], wanted, atol=1e-4)


def test_head_of_neo_bert(tmp_path: Path) -> None:
    model = new_neo(237, pooling_type=4)
    for name, rows in (("cls", D), ("cls.output", 3)):
        model.matrix(name, rows, D)
        model.vector(f"{name}.bias", rows)
    llm = ikpy.LLM(model.write(tmp_path / "model.gguf"), n_threads=1, type_k="f32", type_v="f32")
    states = neo_states(model, np.array(llm.tokenize("the boat", add_special=True)))
    w = {name: value.astype(np.float64) for name, value in model.weights.items()}
    wanted = w["cls.output"] @ np.tanh(w["cls"] @ states[0] + w["cls.bias"]) + w["cls.output.bias"]
    np.testing.assert_allclose(llm.embed("the boat")[0], wanted, atol=1e-4)


def test_a_network_of_another_width(tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=r"tensor 'blk\.0\.ffn_gate\.weight' has wrong"):
        Model.load(new_jina(1, feed_forward_length=48).write(tmp_path / "model.gguf"))


def test_size_classes() -> None:
    for arch, layers, expected in (("jina-bert-v2", 4, "33M"), ("jina-bert-v2", 12, "137M"), ("neo-bert", 28, "250M")):
        assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
