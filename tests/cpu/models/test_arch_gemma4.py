"""gemma4: a random model with all of its parts against a float64 evaluation of the definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import FileFormatError
from tests.cpu.media.media_models import Placed, Text, attend
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 40)
D, HEADS, INPUT, EXPERTS, WIDTH, WINDOW, EPS = 64, 4, 16, 4, 24, 9, 1e-6
IS_WINDOW = [1, 1, 0, 1, 0, 1, 0]
KV_HEADS = [2, 2, 1, 2, 1, 2, 1]
N, N_SHARED = len(IS_WINDOW), 2
FULL_HEAD, WINDOW_HEAD = 32, 16
NORMS = (
    "attn_norm",
    "ffn_norm",
    "post_attention_norm",
    "post_ffw_norm",
    "pre_ffw_norm_2",
    "post_ffw_norm_1",
    "post_ffw_norm_2",
    "post_norm",
)
KEYS = {
    "block_count": N,
    "embedding_length": D,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": FULL_HEAD,
    "attention.value_length": FULL_HEAD,
    "attention.key_length_swa": WINDOW_HEAD,
    "attention.value_length_swa": WINDOW_HEAD,
    "rope.dimension_count": FULL_HEAD,
    "rope.dimension_count_swa": WINDOW_HEAD,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "feed_forward_length": [48, 48, 48, 48, 48, 80, 80],
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": IS_WINDOW,
    "attention.shared_kv_layers": N_SHARED,
    "embedding_length_per_layer_input": INPUT,
    "final_logit_softcapping": 30.0,
    "attention.layer_norm_rms_epsilon": EPS,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
}


def gemma4(*, has_inputs: bool = True) -> RandomModel:
    """Two head sizes, shared caches, keys as values in full layers, inputs of layers, experts; all at once."""
    m = RandomModel("gemma4", 3, **KEYS | {"embedding_length_per_layer_input": INPUT if has_inputs else 0})
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("output_norm", D)
    m.weights["rope_freqs"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    if has_inputs:
        m.matrix("per_layer_token_embd", N_VOCAB, INPUT * N)
        m.matrix("per_layer_model_proj", INPUT * N, D)
        m.norm("per_layer_proj_norm", INPUT)
    for il in range(N):
        p, head = f"blk.{il}", WINDOW_HEAD if IS_WINDOW[il] else FULL_HEAD
        for name in NORMS[: None if has_inputs else -1]:
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV_HEADS[il], head)
        if not IS_WINDOW[il]:
            del m.weights[f"{p}.attn_v"]
        m.norm(f"{p}.attn_q_norm", head)
        m.norm(f"{p}.attn_k_norm", head)
        m.ffn(p, D, KEYS["feed_forward_length"][il])
        m.matrix(f"{p}.ffn_gate_inp", EXPERTS, D)
        m.norm(f"{p}.ffn_gate_inp.scale", D)
        m.matrix(f"{p}.ffn_gate_up_exps", EXPERTS, 2 * WIDTH, D)
        m.matrix(f"{p}.ffn_down_exps", EXPERTS, D, WIDTH)
        m.norm(f"{p}.ffn_down_exps.scale", EXPERTS)
        if has_inputs:
            m.matrix(f"{p}.inp_gate", INPUT, D)
            m.matrix(f"{p}.proj", D, INPUT)
        m.norm(f"{p}.layer_output_scale", 1)
    return m


def experts(w: ref.Weights, p: str, x: np.ndarray) -> np.ndarray:
    """The experts' branch on the residual stream."""
    router = ref.rms_norm(x, w[f"{p}.ffn_gate_inp.scale"], EPS) / math.sqrt(D)
    odds = ref.softmax(router @ w[f"{p}.ffn_gate_inp"].T)
    h, out = ref.rms_norm(x, w[f"{p}.pre_ffw_norm_2"], EPS), np.zeros_like(x)
    for t in range(len(x)):
        best = np.argsort(-odds[t])[:2]
        for i in best:
            gate, up = np.split(w[f"{p}.ffn_gate_up_exps"][i] @ h[t], 2)
            y = w[f"{p}.ffn_down_exps"][i] @ (ref.gelu(gate) * up)
            out[t] += odds[t][i] / odds[t][best].sum() * w[f"{p}.ffn_down_exps.scale"][i] * y
    return ref.rms_norm(out, w[f"{p}.post_ffw_norm_2"], EPS)


def truth(m: RandomModel, text: Text | None = None) -> np.ndarray:
    """Logits of TOKENS, or of a text with pictures, in float64."""
    placed = Placed(TOKENS.tolist() if text is None else text, D)
    e = Evaluation(m)
    w, norm, n_tokens = e.w, ref.rms_norm, len(placed.tokens)
    pos = np.arange(n_tokens, dtype=np.float64)
    x = np.where(placed.is_row[:, None], placed.rows, w["token_embd"][placed.tokens] * math.sqrt(D))
    has_inputs = "per_layer_token_embd" in w
    if has_inputs:
        # Of pictures those of the padding token 0.
        own = w["per_layer_token_embd"][placed.tokens].reshape(n_tokens, N, INPUT) * math.sqrt(INPUT)
        projected = (x @ w["per_layer_model_proj"].T / math.sqrt(D)).reshape(n_tokens, N, INPUT)
        inputs = (own + norm(projected, w["per_layer_proj_norm"], EPS)) / math.sqrt(2)
    cached = {}
    # Rows of a picture see each other through windows only, and not in models with inputs of layers.
    causal = np.tril(np.ones((n_tokens, n_tokens), bool))
    masks = {0: causal, 1: placed.visible(WINDOW) & (causal | (not has_inputs))}
    for il in range(N):
        p, is_window = f"blk.{il}", IS_WINDOW[il]
        head = WINDOW_HEAD if is_window else FULL_HEAD
        plain = ref.plain_angles(WINDOW_HEAD, 1e4, pos)
        angles = plain if is_window else ref.plain_angles(FULL_HEAD, 1e6, pos, w["rope_freqs"])
        h = norm(x, w[f"{p}.attn_norm"], EPS)
        q = norm((h @ w[f"{p}.attn_q"].T).reshape(n_tokens, -1, head), w[f"{p}.attn_q_norm"], EPS)
        if il < N - N_SHARED:
            k = (h @ w[f"{p}.attn_k"].T).reshape(n_tokens, -1, head)
            v = (h @ w[f"{p}.attn_v"].T).reshape(n_tokens, -1, head) if is_window else k
            k = ref.rotate(norm(k, w[f"{p}.attn_k_norm"], EPS), angles, neox=True)
            cached[is_window] = k, norm(v, 1.0, EPS)
        attended = attend(ref.rotate(q, angles, neox=True), *cached[is_window], 1.0, masks[is_window])
        x = x + norm(e.output(il, attended), w[f"{p}.post_attention_norm"], EPS)
        dense = e.ffn(il, norm(x, w[f"{p}.ffn_norm"], EPS), ref.gelu)
        both = norm(dense, w[f"{p}.post_ffw_norm_1"], EPS) + experts(w, p, x)
        x = x + norm(both, w[f"{p}.post_ffw_norm"], EPS)
        if has_inputs:
            gated = ref.gelu(x @ w[f"{p}.inp_gate"].T) * inputs[:, il]
            x = x + norm(gated @ w[f"{p}.proj"].T, w[f"{p}.post_norm"], EPS)
        x = x * w[f"{p}.layer_output_scale"]
    return 30.0 * np.tanh(norm(x, w["output_norm"], EPS) @ w["token_embd"].T / 30.0)


@pytest.mark.parametrize("flash", [False, True])
def test_logits_are_those_of_the_definition(flash: bool, tmp_path: Path) -> None:
    m = gemma4()
    path, expected = m.write(tmp_path / "model.gguf"), truth(m)
    params = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32")
    whole = Context(Model.load(path), params).decode(Batch.single(TOKENS, 0, logits="all"))
    steps = Context(Model.load(path), params)
    single = np.concatenate([steps.decode(Batch.single(TOKENS[i : i + 1], i)) for i in range(len(TOKENS))])
    for form, logits in (("one batch", whole), ("single steps", single)):
        error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max()
        worst = int(error.argmax())
        # Scores that nothing divides make the softmax of random heads steep.
        assert error[worst] < 2e-4, f"{form}: position {worst} off by {error[worst]:.1e} relative"


def test_caches_that_no_layer_has(tmp_path: Path) -> None:
    path = gemma4().write(tmp_path / "model.gguf")
    for n, message in ((N, "7 of 7 layers share"), (N - 2, "layer 2 shares its cache with no earlier layer")):
        with pytest.raises(FileFormatError, match=message):
            Model.load(path, ModelParams(kv_overrides={"gemma4.attention.shared_kv_layers": n}))
