"""gemma3n: random models with all of its parts against a float64 evaluation of the definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from ikpy.vision.rows import MediaRows
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

D, HEADS, KV, HEAD, INPUT, RANK, WINDOW, EPS, F = 48, 4, 2, 16, 8, 6, 9, 1e-6, 72
IS_WINDOW = [True, True, False, True, False, True, False]
N, N_SHARED = len(IS_WINDOW), 2
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm")
CUTOFFS = [1.2, 0.3, -math.inf, -0.7, 1.2, -math.inf, -math.inf]
"""Standard deviations above the mean from which gates count."""
SPARSE_FIRST = [1.6448533535] * 10 + [-math.inf] * 2


def gemma3n(n_streams: int = 4, active: int = 0, windows: list[bool] = IS_WINDOW, gain: float = 1.0) -> RandomModel:
    """Streams, shared caches, inputs of layers, sparse activations; all at once. gain: of what layers decide by."""
    n_layer = len(windows)
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, KV, HEAD, F),
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": 1e6,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": N_SHARED,
        "embedding_length_per_layer_input": INPUT,
        "final_logit_softcapping": 30.0,
        "altup.num_inputs": n_streams,
        "altup.active_idx": active,
        "activation_sparsity_scale": CUTOFFS if windows is IS_WINDOW else SPARSE_FIRST,
    }
    m = RandomModel("gemma3n", 3, **keys)
    checks.frame(m, D, tied=True)
    m.matrix("per_layer_token_embd", N_VOCAB, INPUT * n_layer)
    m.matrix("per_layer_model_proj", INPUT * n_layer, D)
    m.norm("per_layer_proj_norm", INPUT)
    m.matrix("altup_proj", n_streams - 1, D, D)
    m.matrix("altup_unembd_proj", n_streams - 1, D, D)
    for il in range(n_layer):
        p = f"blk.{il}"
        for name in NORMS:
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.norm(f"{p}.attn_q_norm", HEAD)
        m.norm(f"{p}.attn_k_norm", HEAD)
        m.ffn(p, D, F)
        m.matrix(f"{p}.inp_gate", INPUT, D)
        m.matrix(f"{p}.proj", D, INPUT)
        m.matrix(f"{p}.laurel_l", RANK, D)
        m.matrix(f"{p}.laurel_r", D, RANK)
        m.matrix(f"{p}.altup_predict_coef", n_streams**2, n_streams)
        m.matrix(f"{p}.altup_correct_coef", n_streams, n_streams)
        m.norm(f"{p}.altup_correct_scale", D)
        m.norm(f"{p}.altup_router_norm", D)
        m.matrix(f"{p}.altup_router", n_streams, D)
        m.weights[f"{p}.altup_router"] *= 0.5 * D * gain
        m.weights[f"{p}.attn_q_norm"] *= 0.5 * gain
    return m


def gentle_gemma3n() -> tuple[RandomModel, np.ndarray]:
    """A model whose layers decide little, with its truth."""
    m = gemma3n(gain=0.4)
    return m, truth(m)


def alike(x: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    """x [T, D] with the root mean square of the pattern."""
    return x * np.sqrt((pattern**2).mean(-1, keepdims=True) / (x**2).mean(-1, keepdims=True))


def network(w: ref.Weights, h: np.ndarray, cutoff: float) -> np.ndarray:
    """The feed-forward network of a layer."""
    gate = h @ w["ffn_gate"].T
    if cutoff != -math.inf:
        gate = np.maximum(gate - gate.mean(-1, keepdims=True) - cutoff * gate.std(-1, keepdims=True), 0)
    return (ref.gelu(gate) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T


def truth(m: RandomModel, tokens: np.ndarray = TOKENS, rows: np.ndarray | None = None, start: int = 0) -> np.ndarray:
    """Logits of tokens in float64. rows [n, D]: of a picture in place of as many tokens from a start, which have the
    inputs of token 0 and see earlier ones alone."""
    e = Evaluation(m)
    keys, norm, pos = m.keys, ref.rms_norm, np.arange(len(tokens), dtype=np.float64)
    n, active, n_layer = keys["altup.num_inputs"], keys["altup.active_idx"], keys["block_count"]
    x = e.w["token_embd"][tokens] * math.sqrt(D)
    if rows is not None:
        tokens = tokens.copy()
        x[start : start + len(rows)], tokens[start : start + len(rows)] = rows, 0
    own = e.w["per_layer_token_embd"][tokens].reshape(-1, n_layer, INPUT) * math.sqrt(INPUT)
    projected = (x @ e.w["per_layer_model_proj"].T / math.sqrt(D)).reshape(-1, n_layer, INPUT)
    inputs = (own + norm(projected, e.w["per_layer_proj_norm"], EPS)) / math.sqrt(2)
    streams = np.stack([x, *(alike(x @ e.w["altup_proj"][i].T, x) for i in range(n - 1))])
    cached = {}
    for il in range(n_layer):
        w, is_window = checks.layer_weights(e, il), keys["attention.sliding_window_pattern"][il]

        def routed(x: np.ndarray, w: ref.Weights = w) -> np.ndarray:
            return np.tanh(norm(x, w["altup_router_norm"], EPS) / D @ w["altup_router"].T)

        coefs = (routed(streams[active]) @ w["altup_predict_coef"].T).reshape(-1, n, n)
        predicted = streams + np.einsum("tij,jtd->itd", coefs, streams)
        x = predicted[active]
        h = norm(x, w["attn_norm"], EPS)
        angles = ref.plain_angles(HEAD, 1e4 if is_window else 1e6, pos)
        q, k, v = e.qkv(il, h)
        if il < n_layer - keys["attention.shared_kv_layers"]:
            k = ref.rotate(norm(k, w["attn_k_norm"], EPS), angles, neox=True)
            cached[is_window] = k, norm(v, 1.0, EPS)
        visible = (lambda i, j: i - j < WINDOW) if is_window else None
        q = ref.rotate(norm(q, w["attn_q_norm"], EPS), angles, neox=True)
        attended = e.output(il, ref.attend(q, *cached[is_window], 1.0, visible=visible))
        laurel = h + norm(h @ w["laurel_l"].T @ w["laurel_r"].T, w["laurel_post_norm"], EPS)
        x = (x + norm(attended, w["post_attention_norm"], EPS) + laurel) / math.sqrt(2)
        out = network(w, norm(x, w["ffn_norm"], EPS), keys["activation_sparsity_scale"][il])
        x = x + norm(out, w["post_ffw_norm"], EPS)
        shares = 1 + routed(x) @ w["altup_correct_coef"].T
        streams = predicted + np.einsum("ti,td->itd", shares, x - predicted[active])
        gated = ref.gelu(streams[active] * w["altup_correct_scale"] @ w["inp_gate"].T) * inputs[:, il]
        streams[1:] += norm(gated @ w["proj"].T, w["post_norm"], EPS)
    rest = [alike(streams[i] @ e.w["altup_unembd_proj"][i - 1].T, streams[0]) for i in range(1, n)]
    y = norm((streams[0] + sum(rest)) / n, e.w["output_norm"], EPS)
    return 30.0 * np.tanh(y @ e.w["token_embd"].T / 30.0)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_pictures(flash_attn: bool, tmp_path: Path) -> None:
    """Rows between tokens, across micro-batches and beyond a window."""
    m, n, start = gemma3n(gain=0.4), 19, 5
    store, rows = MediaStore(N_VOCAB, 1 << 20), np.random.default_rng(8).normal(0, 1, (n, D)).astype(np.float32)
    path = m.write(tmp_path / "model.gguf")
    params = ContextParams(
        n_ctx=128, n_ubatch=16, flash_attn=flash_attn, type_k="f32", type_v="f32", media=store, n_threads=1
    )
    ids = store.add(b"a", lambda: MediaRows(rows))
    text = [*TOKENS[:start].tolist(), *ids, *TOKENS[start + n :].tolist()]
    found = Context(Model.load(str(path), ModelParams()), params).decode(Batch.single(text, logits="all"))
    wanted = truth(m, TOKENS, rows.astype(np.float64), start)
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    print(f"token {error.argmax()}: {error.max():.1e}")
    assert error.max() < 2e-4
    assert np.abs(truth(m) - wanted).max() > 0.1


@pytest.mark.parametrize(("n_streams", "active"), [(4, 0), (3, 2), (2, 1)])
def test_definition(n_streams: int, active: int, tmp_path: Path) -> None:
    m = gemma3n(n_streams, active)
    # Scores that nothing divides make the softmax of random heads steep.
    path = checks.check_definition(m, truth(m), tmp_path, 2e-4)
    checks.check_shift(path)


def test_windows_and_cutoffs_of_published_models(tmp_path: Path) -> None:
    """Files without them mean those of E2B and E4B."""
    m = gemma3n(windows=[(il + 1) % 5 != 0 for il in range(len(SPARSE_FIRST))], gain=0.4)
    expected = truth(m)
    for name in ("attention.sliding_window_pattern", "activation_sparsity_scale", "altup.num_inputs"):
        del m.keys[name]
    path = m.write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    checks.hold("defaults", context.decode(Batch.single(TOKENS, logits="all")), expected, 2e-4)


def test_an_embedding_of_zeros(tmp_path: Path) -> None:
    """Its streams are zeros, not undefined."""
    m = gemma3n()
    m.weights["token_embd"][TOKENS[0]] = 0
    path = m.write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1))
    assert np.isfinite(context.decode(Batch.single(TOKENS, logits="all"))).all()


def test_sizes_that_no_model_has(tmp_path: Path) -> None:
    path = gemma3n().write(tmp_path / "model.gguf")
    for key, value, message in (
        ("altup.num_inputs", 1, "1 residual streams of which layers work on stream 0 are not possible"),
        ("altup.num_inputs", 9, "9 residual streams"),
        ("altup.active_idx", 4, "stream 4 are not possible"),
        ("embedding_length_per_layer_input", 0, "embedding_length_per_layer_input is 0"),
        ("attention.shared_kv_layers", N, "7 of 7 layers share"),
    ):
        with pytest.raises(FileFormatError, match=message):
            Model.load(path, ModelParams(kv_overrides={f"gemma3n.{key}": value}))
    m = gemma3n()
    m.keys["activation_sparsity_scale"] = [math.nan] * N
    with pytest.raises(FileFormatError, match="holds numbers that are not finite"):
        Model.load(m.write(tmp_path / "nan.gguf"))
    for name in ("laurel_l", "altup_predict_coef", "altup_router"):
        m = gemma3n()
        del m.weights[f"blk.2.{name}"]
        with pytest.raises(FileFormatError, match=f"tensor 'blk.2.{name}.weight' not found"):
            Model.load(m.write(tmp_path / "lacking.gguf"))


def test_size_classes() -> None:
    for layers, expected in ((30, "E2B"), (35, "E4B")):
        assert size_class({"general.architecture": "gemma3n", "gemma3n.block_count": layers}) == expected
