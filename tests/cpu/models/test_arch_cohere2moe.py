"""Command A+: random models against their definition."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

N_DENSE, WINDOW, SCALE = 2, 9, 0.25
D, HEADS, KV, HEAD, F_DENSE, F = 96, 4, 2, 32, 76, 36
N_EXPERT, USED, N_SHARED = 8, 3, 2
LAYER = {"attention.layer_norm_epsilon": 1e-5}
KINDS = [True, False, True, True, False, True]
"""Which layers have a window: the second dense one has none and knows positions all the same."""


def new_model(seed: int, *, gating: int = 2, rms: bool = False, n_predict: int = 0, tied: bool = True) -> RandomModel:
    """gating: 2 sigmoid, 3 softmax of the chosen; n_predict: prediction layers behind the others."""
    n_layer = len(KINDS) + n_predict
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, KV, HEAD, F_DENSE),
        **(RMS if rms else LAYER),
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": KINDS,
        "logit_scale": SCALE,
        "leading_dense_block_count": N_DENSE,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
        "expert_shared_count": N_SHARED,
        "expert_shared_feed_forward_length": N_SHARED * F,
        "expert_gating_func": gating,
        "expert_weights_norm": gating == 2,
        **({"nextn_predict_layers": n_predict} if n_predict else {}),
    }
    m = RandomModel("cohere2moe", seed, **keys)
    checks.frame(m, D, tied=tied)
    for il in range(n_layer):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        if il < N_DENSE:
            m.ffn(p, D, F_DENSE)
        else:
            checks.experts(m, p, D, F, N_EXPERT)
            m.ffn(p, D, N_SHARED * F, "_shexp")
    for il in range(len(KINDS), n_layer):
        m.matrix(f"blk.{il}.nextn.eh_proj", D, 2 * D)
        m.norm(f"blk.{il}.nextn.enorm", D)
        m.norm(f"blk.{il}.nextn.hnorm", D)
    return m


def routed(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """The experts of the largest router logits, weighed by normalised sigmoids or by the softmax of the chosen."""
    z = h @ w["ffn_gate_inp"].T
    kept = checks.chosen(np.ones_like(z), USED, z)
    weights = ref.sigmoid(z) * kept if e.keys["expert_gating_func"] == 2 else np.exp(z) * kept
    scaled = weights / weights.sum(-1, keepdims=True) if e.keys["expert_gating_func"] == 3 else weights
    if e.keys["expert_weights_norm"]:
        scaled = scaled / scaled.sum(-1, keepdims=True)
    return checks.routed(w, h, scaled, USED)


def normed(e: Evaluation, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The norm that the epsilon of the file means."""
    return (ref.rms_norm if "attention.layer_norm_rms_epsilon" in e.keys else ref.layer_norm)(x, w, e.eps)


def block(e: Evaluation, il: int, x: np.ndarray, *, window: bool, rotated: bool, dense: bool) -> np.ndarray:
    """A layer: attention and network read the same normed rows."""
    w = checks.layer_weights(e, il)
    h = normed(e, x, w["attn_norm"])
    q, k, v = e.qkv(il, h)
    if rotated:
        angles = ref.plain_angles(HEAD, 10000.0, POS[: len(x)])
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
    visible = (lambda i, j: i - j < WINDOW) if window else None
    attended = e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD), visible=visible))
    net = e.ffn(il, h) if dense else (routed(e, w, h) + e.ffn(il, h, suffix="_shexp")) / 2
    return x + attended + net


def states(e: Evaluation) -> np.ndarray:
    """Normed states [T, D] behind the layers, prediction layers left out."""
    x = e.w["token_embd"][TOKENS]
    for il, window in enumerate(KINDS):
        x = block(e, il, x, window=window, rotated=window or il < N_DENSE, dense=il < N_DENSE)
    return normed(e, x, e.w["output_norm"])


def made(seed: int, **kinds: Any) -> tuple[RandomModel, np.ndarray]:
    m = new_model(seed, **kinds)
    e = Evaluation(m)
    return m, SCALE * states(e) @ e.w.get("output", e.w["token_embd"]).T


def cohere2moe() -> tuple[RandomModel, np.ndarray]:
    """Sigmoids of the chosen experts, renormalised."""
    return made(131)


def cohere2moe_softmax() -> tuple[RandomModel, np.ndarray]:
    """Softmax over the chosen experts, RMS norms, an output matrix of its own."""
    return made(132, gating=3, rms=True, tied=False)


def cohere2moe_predicting() -> tuple[RandomModel, np.ndarray]:
    """A prediction layer behind the others."""
    return made(133, n_predict=1)


def command_a(n: int = 64) -> tuple[RandomModel, np.ndarray]:
    """cohere2 with as many layers as Command A, whose heads have no norms."""
    heads, kv = 3, 1
    keys = {**LAYER, "attention.sliding_window": WINDOW, "logit_scale": SCALE}
    m = RandomModel("cohere2", 134, **checks.shape(n, D, heads, kv, HEAD, F), **keys)
    checks.frame(m, D, tied=True)
    for il in range(n):
        m.norm(f"blk.{il}.attn_norm", D)
        m.attention(f"blk.{il}", D, heads, kv, HEAD)
        m.ffn(f"blk.{il}", D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(n):
        x = block(e, il, x, window=il % 4 < 3, rotated=il % 4 < 3, dense=True)
    return m, SCALE * normed(e, x, e.w["output_norm"]) @ e.w["token_embd"].T


MODELS = [cohere2moe, cohere2moe_softmax, cohere2moe_predicting, command_a]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.06)


def test_prediction_layer(tmp_path: Path) -> None:
    """It reads the next token beside the normed state, attends to everything and knows positions."""
    model = new_model(133, n_predict=1)
    e, il = Evaluation(model), len(KINDS)
    w, before = checks.layer_weights(e, il), states(e)
    embedded = normed(e, e.w["token_embd"][TOKENS], w["nextn.enorm"])
    x = np.concatenate([embedded, normed(e, before, w["nextn.hnorm"])], axis=1) @ w["nextn.eh_proj"].T
    x = block(e, il, x, window=False, rotated=True, dense=False)
    truth = SCALE * normed(e, x, e.w["output_norm"]) @ e.w["token_embd"].T
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    head = Context(loaded.prediction_head(), ContextParams(n_ctx=64, n_threads=1, type_k="f32", type_v="f32"))
    logits = head.decode(Batch.single(TOKENS, logits="all"), before.astype(np.float32))
    error = np.abs(logits - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < checks.FLOAT_BOUND, f"token {error.argmax()} is off by {error.max():.1e}"


def test_drafts_of_the_prediction_layer(tmp_path: Path) -> None:
    """Greedy text is that of plain decoding."""
    loaded = Model.load(new_model(133, n_predict=1).write(tmp_path / "model.gguf"))
    settings: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32"}
    head = Context(loaded.prediction_head(), ContextParams(**settings, embeddings=True))
    texts = []
    for speculator in (None, Speculator([HeadDraft(head, p_min=0.0, n_ctx=256)], SpeculativeParams(n_max=3))):
        main = Context(loaded, ContextParams(**settings, token_states=speculator is not None, n_ubatch=7))
        sequence = GrowingSequence(main, speculator=speculator)
        logits = sequence.feed(TOKENS.tolist())
        sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
        texts.append(list(islice(sequence.generate(sampler, logits, frozenset()), 40)))
    assert texts[0] == texts[1]


def test_states_of_all_tokens(tmp_path: Path) -> None:
    """What drafts read, also where one token alone has logits."""
    model, _ = cohere2moe()
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", token_states=True)
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    context.decode(Batch.single(TOKENS))
    assert context.token_states is not None
    truth = states(Evaluation(model))
    assert np.abs(context.token_states - truth).max() < checks.FLOAT_BOUND * np.abs(truth).max()


def test_a_number_as_the_pattern(tmp_path: Path) -> None:
    """The first of so many layers has no window."""
    model, _ = cohere2moe()
    model.keys["attention.sliding_window_pattern"] = 3
    arch = Model.load(model.write(tmp_path / "model.gguf")).arch
    assert [arch.window(il)[0] != "none" for il in range(6)] == [False, True, True] * 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 0, "3 of 0 experts"),
        ("attention.sliding_window_pattern", None, "sliding_window_pattern"),
        ("logit_scale", None, "logit_scale"),
        ("attention.layer_norm_epsilon", None, "layer_norm_epsilon"),
        ("expert_gating_func", 9, "expert_gating_func 9"),
        ("expert_used_count", 0, "no expert layers are used"),
        ("nextn_predict_layers", 6, "leave none to run"),
    ],
)
def test_what_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    model = new_model(135)
    model.keys[key] = value
    model.keys = {name: v for name, v in model.keys.items() if v is not None}
    with pytest.raises(FileFormatError, match=message):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_size_class() -> None:
    keys = {"general.architecture": "cohere2moe", "cohere2moe.vocab_size": N_VOCAB}
    assert size_class({**keys, "cohere2moe.block_count": 49}) == "30B.A3B"
    assert size_class(keys) == "?B"
