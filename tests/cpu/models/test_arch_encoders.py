"""modern-bert, nomic-bert-moe, jina-bert-v3: states of random models against their definition, heads of rerankers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.encoder_checks import check_embeddings, check_states
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_arch_gemma_embedding import attended
from tests.cpu.models.test_encoders import WORDS, gelu, norm_with_bias

D, HEADS, HEAD, F, EPS = 96, 3, 32, 160, 2e-3
N_MODERN, WINDOW, BASE, WINDOW_BASE = 5, 12, 16e4, 1e4
N_LAYER, N_EXPERT, USED = 4, 5, 2
TOKENS = np.random.default_rng(24).integers(4, N_VOCAB, 35)
Made = tuple[RandomModel, np.ndarray]


def keys_of(n_layer: int, base: float) -> dict[str, Any]:
    return {
        "block_count": n_layer,
        "embedding_length": D,
        "attention.head_count": HEADS,
        "feed_forward_length": F,
        "attention.layer_norm_epsilon": EPS,
        "rope.freq_base": base,
        "pooling_type": 1,
    }


# modern-bert


def new_modern(seed: int, **keys: Any) -> RandomModel:
    """Windows as in the published models."""
    window = {"attention.sliding_window": WINDOW, "rope.freq_base_swa": WINDOW_BASE}
    m = RandomModel("modern-bert", seed, **keys_of(N_MODERN, BASE) | window | keys)
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("token_embd_norm", D)
    m.norm("output_norm", D)
    for il in range(N_MODERN):
        p = f"blk.{il}"
        if il:
            m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.matrix(f"{p}.attn_qkv", 3 * D, D)
        m.matrix(f"{p}.attn_output", D, D)
        m.matrix(f"{p}.ffn_up", 2 * F, D)
        m.matrix(f"{p}.ffn_down", D, F)
    return m


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    return ref.rotate(x, ref.plain_angles(HEAD, base, np.arange(len(x), dtype=np.float64)), neox=True)


def modern_states(
    m: RandomModel,
    tokens: np.ndarray,
    full: tuple[int, ...] = (0, 3),
    act: Callable[[np.ndarray], np.ndarray] = gelu,
    window_base: float = WINDOW_BASE,
) -> np.ndarray:
    """Normed states [T, D], float64; full: layers without a window."""
    e = Evaluation(m)
    x = ref.layer_norm(e.w["token_embd"][tokens], e.w["token_embd_norm"], EPS)
    for il in range(N_MODERN):
        w = checks.layer_weights(e, il)
        h = ref.layer_norm(x, w["attn_norm"], EPS) if "attn_norm" in w else x
        q, k, v = (part.reshape(-1, HEADS, HEAD) for part in np.split(h @ w["attn_qkv"].T, 3, axis=1))
        base = BASE if il in full else window_base
        x = (
            x
            + attended(rotated(q, base), rotated(k, base), v, None if il in full else WINDOW // 2) @ w["attn_output"].T
        )
        gate, up = np.split(ref.layer_norm(x, w["ffn_norm"], EPS) @ w["ffn_up"].T, 2, axis=1)
        x = x + (act(gate) * up) @ w["ffn_down"].T
    return ref.layer_norm(x, e.w["output_norm"], EPS)


def modern_bert() -> Made:
    m = new_modern(131)
    return m, modern_states(m, TOKENS)


def modern_bert_silu() -> Made:
    """As Granite Embedding has it."""
    m = new_modern(132, hidden_activation="silu")
    return m, modern_states(m, TOKENS, act=ref.silu)


def modern_bert_one_base() -> Made:
    """Without windows."""
    m = new_modern(133, **{"attention.sliding_window": 0})
    return m, modern_states(m, TOKENS, tuple(range(N_MODERN)))


def modern_bert_period() -> Made:
    m = new_modern(134, **{"attention.sliding_window_pattern": 2})
    return m, modern_states(m, TOKENS, (0, 2, 4))


# nomic-bert-moe, jina-bert-v3


def new_post_norm(arch: str, seed: int, *, types: bool = True, biases: bool = True, **keys: Any) -> RandomModel:
    """types: with embeddings of token types."""
    m = RandomModel(arch, seed, **keys_of(N_LAYER, 1000.0) | keys)
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, D)
    if types:
        m.matrix("token_types", 1, D)
    norm_with_bias(m, "token_embd_norm", D)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.matrix(f"{p}.attn_qkv", 3 * D, D)
        m.matrix(f"{p}.attn_output", D, D)
        if "expert_count" in keys and il % keys["moe_every_n_layers"] == 1:
            m.matrix(f"{p}.ffn_gate_inp", N_EXPERT, D)
            m.matrix(f"{p}.ffn_up_exps", N_EXPERT, F, D)
            m.matrix(f"{p}.ffn_down_exps", N_EXPERT, D, F)
        else:
            m.matrix(f"{p}.ffn_up", F, D)
            m.matrix(f"{p}.ffn_down", D, F)
            if biases:
                m.vector(f"{p}.ffn_up.bias", F)
                m.vector(f"{p}.ffn_down.bias", D)
        if biases:
            m.vector(f"{p}.attn_qkv.bias", 3 * D)
            m.vector(f"{p}.attn_output.bias", D)
        norm_with_bias(m, f"{p}.attn_output_norm", D)
        norm_with_bias(m, f"{p}.layer_output_norm", D)
    return m


def experts(w: ref.Weights, x: np.ndarray) -> np.ndarray:
    """By softmax over all; weights are not renormalised."""
    weights = checks.chosen(ref.softmax(x @ w["ffn_gate_inp"].T), USED)
    hidden = gelu(np.einsum("td,efd->tef", x, w["ffn_up_exps"]))
    return np.einsum("te,tef,edf->td", weights, hidden, w["ffn_down_exps"])


def post_norm_states(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """States [T, D], float64."""
    e = Evaluation(m)

    def norm(x: np.ndarray, w: ref.Weights, name: str) -> np.ndarray:
        return ref.layer_norm(x, w[name], EPS) + w[f"{name}.bias"]

    def linear(x: np.ndarray, w: ref.Weights, name: str) -> np.ndarray:
        return x @ w[name].T + w.get(f"{name}.bias", 0.0)

    x = e.w["token_embd"][tokens] + (e.w["token_types"][0] if "token_types" in e.w else 0.0)
    x = norm(x, e.w, "token_embd_norm")
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        q, k, v = (part.reshape(-1, HEADS, HEAD) for part in np.split(linear(x, w, "attn_qkv"), 3, axis=1))
        out = attended(rotated(q, 1000.0), rotated(k, 1000.0), v, None)
        x = norm(x + linear(out, w, "attn_output"), w, "attn_output_norm")
        branch = experts(w, x) if "ffn_gate_inp" in w else linear(gelu(linear(x, w, "ffn_up")), w, "ffn_down")
        x = norm(x + branch, w, "layer_output_norm")
    return x


MOE = {"expert_count": N_EXPERT, "expert_used_count": USED, "moe_every_n_layers": 2}


def nomic_bert_moe() -> Made:
    m = new_post_norm("nomic-bert-moe", 135, **MOE)
    return m, post_norm_states(m, TOKENS)


def jina_bert_v3() -> Made:
    m = new_post_norm("jina-bert-v3", 136)
    return m, post_norm_states(m, TOKENS)


def jina_bert_v3_without_types() -> Made:
    m = new_post_norm("jina-bert-v3", 137, types=False)
    return m, post_norm_states(m, TOKENS)


MODELS = [
    modern_bert,
    modern_bert_silu,
    modern_bert_one_base,
    modern_bert_period,
    nomic_bert_moe,
    jina_bert_v3,
    jina_bert_v3_without_types,
]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_states_are_those_of_the_definition(make: Callable[[], Made], flash: bool, tmp_path: Path) -> None:
    model, wanted = make()
    check_states(model, TOKENS, wanted, tmp_path, flash=flash)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_embeddings(make: Callable[[], Made], tmp_path: Path) -> None:
    check_embeddings(make()[0], tmp_path)


@pytest.mark.parametrize(("number", "first"), [(None, False), (1, False), (2, True)])
def test_head_of_rerankers(number: int | None, first: bool, tmp_path: Path) -> None:
    """Of the mean of all states or of the first one: dense, GELU, norm, output."""
    keys = {} if number is None else {"classifier.pooling_type": number}
    model = new_modern(138, **keys | {"pooling_type": 4})
    model.matrix("cls", D, D)
    model.norm("cls.norm", D)
    model.matrix("cls.output", 2, D)
    model.vector("cls.output.bias", 2)
    llm = ikpy.LLM(model.write(tmp_path / "model.gguf"), n_threads=1, type_k="f32", type_v="f32")
    states = modern_states(model, np.array(llm.tokenize("the boat", add_special=True)))
    w = {name: value.astype(np.float64) for name, value in model.weights.items()}
    x = gelu(w["cls"] @ (states[0] if first else states.mean(axis=0)))
    wanted = w["cls.output"] @ ref.layer_norm(x, w["cls.norm"], EPS) + w["cls.output.bias"]
    assert llm.pooling == "rank"
    np.testing.assert_allclose(llm.embed("the boat")[0], wanted, atol=1e-4)


def with_period(n: int) -> RandomModel:
    """Experts in every second layer, in a file that says another number."""
    model = new_post_norm("nomic-bert-moe", 1, **MOE)
    model.keys["moe_every_n_layers"] = n
    return model


BAD: list[tuple[Callable[[], RandomModel], str]] = [
    (lambda: new_modern(1, hidden_activation="tanh"), "modern-bert.hidden_activation 'tanh' is not supported"),
    (lambda: new_modern(1, **{"classifier.pooling_type": 3}), "classifier.pooling_type 3 is not supported"),
    (lambda: new_post_norm("nomic-bert-moe", 1, moe_every_n_layers=2), "nomic-bert-moe.expert_count is 0"),
    (lambda: with_period(4), "tensor 'blk.3.ffn_up.weight' not found"),
    (lambda: new_post_norm("jina-bert-v3", 1, **{"feed_forward_length": 32}), "tensor 'blk.0.ffn_up.weight' has wrong"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_what_cannot_be(make: Callable[[], RandomModel], message: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=message):
        Model.load(make().write(tmp_path / "model.gguf"))


def test_norms_that_lack(tmp_path: Path) -> None:
    model = new_modern(139)
    del model.weights["blk.1.attn_norm"]
    with pytest.raises(IkpyError, match=r"tensor 'blk\.1\.attn_norm\.weight' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_windows_to_both_sides_keep_all_cells(window: int, tmp_path: Path) -> None:
    log, model = list[str](), new_modern(140, **{"attention.sliding_window": window})
    settings = ContextParams(n_ctx=64, n_threads=1, swa_full=True)
    Context(Model.load(model.write(tmp_path / "model.gguf")), settings, log=log.append)
    why = "layers with windows to both sides keep all tokens in any case"
    why = why if window else "the model attends to all tokens in every layer"
    assert f"warning: --swa-full has no effect: {why}" in log
