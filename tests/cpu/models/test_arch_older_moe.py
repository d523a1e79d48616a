"""DBRX, Arctic, SmallThinker, OpenELM and PLM: random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.models.size_class import size_class
from tests.cpu.convert.older_moe_checkpoints import ELM_HEADS, ELM_KV, NOPE, PLM_FF, RANK, ROT, VALUE
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import LONG, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, HEADS, KV, HEAD, F, EXPERTS, USED = 3, 4, 2, 32, 48, 6, 2
D = HEADS * HEAD
Act = Callable[[np.ndarray], np.ndarray]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def routed(w: ref.Weights, h: np.ndarray, weights: np.ndarray, act: Act = ref.silu) -> np.ndarray:
    """Sum over experts of weight (0: not chosen) times expert."""
    out = np.zeros_like(h)
    for e in range(len(w["ffn_gate_inp"])):
        hidden = act(h @ w["ffn_gate_exps"][e].T) * (h @ w["ffn_up_exps"][e].T)
        out += weights[:, e : e + 1] * (hidden @ w["ffn_down_exps"][e].T)
    return out


def renormalised(scores: np.ndarray) -> np.ndarray:
    """Of the best experts of every token, with a sum of 1."""
    kept = checks.chosen(scores, USED)
    return kept / kept.sum(-1, keepdims=True)


def places(tokens: np.ndarray) -> np.ndarray:
    return np.arange(len(tokens), dtype=np.float64)


def attended(
    e: Evaluation, il: int, h: np.ndarray, *, neox: bool, clamp: float = 0.0, fused: bool = False
) -> np.ndarray:
    """Attention of the usual kind behind its output matrix."""
    if fused:
        x = h @ e.w[f"blk.{il}.attn_qkv"].T
        x = np.clip(x, -clamp, clamp) if clamp else x
        q, k, v = np.split(x.reshape(len(h), -1, HEAD), (HEADS, HEADS + KV), axis=1)
    else:
        q, k, v = e.qkv(il, h)
    angles = ref.plain_angles(e.head, 10000.0, places(h))
    q, k = (ref.rotate(x, angles, neox=neox) for x in (q, k))
    return e.output(il, ref.attend(q, k, v, 1 / math.sqrt(e.head)))


# DBRX

CLAMP = 0.9


def dbrx() -> tuple[RandomModel, np.ndarray]:
    """LayerNorm without biases, bounded q, k and v."""
    keys = {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": CLAMP}
    keys |= {"expert_count": EXPERTS, "expert_used_count": USED}
    m = RandomModel("dbrx", 191, **checks.shape(N, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.attn_output_norm", D)
        m.matrix(f"{p}.attn_qkv", (HEADS + 2 * KV) * HEAD, D)
        m.matrix(f"{p}.attn_output", D, D)
        checks.experts(m, p, D, F, EXPERTS)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N):
        w = checks.layer_weights(e, il)
        h = ref.layer_norm(x, w["attn_norm"], e.eps)
        x = x + attended(e, il, h, neox=True, clamp=CLAMP, fused=True)
        h = ref.layer_norm(x, w["attn_output_norm"], e.eps)
        x = x + routed(w, h, renormalised(ref.softmax(h @ w["ffn_gate_inp"].T)))
    return m, ref.layer_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


# Arctic


def arctic() -> tuple[RandomModel, np.ndarray]:
    """Experts beside attention and a dense network."""
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED}
    m = RandomModel("arctic", 192, **checks.shape(N, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm", "ffn_norm_exps"):
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, D)
        checks.experts(m, p, D, F, EXPERTS)
    return m, arctic_logits(Evaluation(m), TOKENS)


def arctic_logits(e: Evaluation, tokens: np.ndarray, *, neox: bool = False) -> np.ndarray:
    """Logits [T, V]."""
    x = e.w["token_embd"][tokens]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["ffn_norm_exps"], e.eps)
        beside = routed(w, h, renormalised(ref.softmax(h @ w["ffn_gate_inp"].T)))
        x = x + attended(e, il, ref.rms_norm(x, w["attn_norm"], e.eps), neox=neox)
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps)) + beside
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


# SmallThinker

WINDOW, N_THINKER = 9, 6


def smallthinker(*, windows: bool = True, softmax: bool = False) -> tuple[RandomModel, np.ndarray]:
    """Routers in front of attention; windows with positions, full layers without."""
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": F}
    keys |= {"attention.sliding_window": WINDOW} if windows else {}
    keys |= {"expert_gating_func": 1 if softmax else 2}
    m = RandomModel("smallthinker", 193, **checks.shape(N_THINKER, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=True)
    for il in range(N_THINKER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        checks.experts(m, p, D, F, EXPERTS)
    return m, smallthinker_logits(Evaluation(m), TOKENS)


def smallthinker_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    window, softmax = e.keys.get("attention.sliding_window", 0), e.keys["expert_gating_func"] == 1
    x = e.w["token_embd"][tokens]
    angles = ref.plain_angles(e.head, 10000.0, places(tokens))
    for il in range(e.n_layer):
        w, is_full = checks.layer_weights(e, il), window and il % 4 == 0
        logits = x @ w["ffn_gate_inp"].T
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        if not is_full:
            q, k = (ref.rotate(y, angles, neox=True) for y in (q, k))
        visible = (lambda i, j: i - j < window) if window and not is_full else None
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(e.head), visible=visible))
        scores = ref.softmax(logits) if softmax else ref.sigmoid(logits)
        x = x + routed(w, ref.rms_norm(x, w["ffn_norm"], e.eps), renormalised(scores), relu)
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w.get("output", e.w["token_embd"]).T


def smallthinker_without_windows() -> tuple[RandomModel, np.ndarray]:
    return smallthinker(windows=False, softmax=True)


# OpenELM

ELM_FF = (48, 80, 112)


def openelm() -> tuple[RandomModel, np.ndarray]:
    """Heads and networks of every layer."""
    keys: dict[str, Any] = {**checks.shape(N, D, HEADS, KV, HEAD, F), **RMS}
    keys |= {"attention.head_count": list(ELM_HEADS), "attention.head_count_kv": list(ELM_KV)}
    keys |= {"feed_forward_length": list(ELM_FF)}
    m = RandomModel("openelm", 194, **keys)
    checks.frame(m, D, tied=True)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.norm(f"{p}.attn_q_norm", HEAD)
        m.norm(f"{p}.attn_k_norm", HEAD)
        m.matrix(f"{p}.attn_qkv", (ELM_HEADS[il] + 2 * ELM_KV[il]) * HEAD, D)
        m.matrix(f"{p}.attn_output", D, ELM_HEADS[il] * HEAD)
        m.ffn(p, D, ELM_FF[il])
    return m, openelm_logits(Evaluation(m), TOKENS)


def openelm_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    x, head = e.w["token_embd"][tokens], e.head
    angles = ref.plain_angles(head, 10000.0, places(tokens))
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        heads = (ref.rms_norm(x, w["attn_norm"], e.eps) @ w["attn_qkv"].T).reshape(len(x), -1, head)
        q, k, v = np.split(heads, (ELM_HEADS[il], ELM_HEADS[il] + ELM_KV[il]), axis=1)
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
        q, k = (ref.rotate(y, angles, neox=True) for y in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head)))
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


# PLM


def plm(tokens: np.ndarray = TOKENS) -> tuple[RandomModel, np.ndarray]:
    """Latent attention and a network without a gate."""
    keys = {**checks.shape(N, D, HEADS, HEADS, NOPE + ROT, PLM_FF), **RMS, "attention.value_length": VALUE}
    keys |= {"attention.kv_lora_rank": RANK, "rope.dimension_count": ROT}
    m = RandomModel("plm", 195, **keys)
    checks.frame(m, D, tied=True)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.norm(f"{p}.attn_kv_a_norm", RANK)
        m.matrix(f"{p}.attn_q", HEADS * (NOPE + ROT), D)
        m.matrix(f"{p}.attn_kv_a_mqa", RANK + ROT, D)
        m.matrix(f"{p}.attn_kv_b", HEADS * (NOPE + VALUE), RANK)
        m.matrix(f"{p}.attn_output", D, HEADS * VALUE)
        m.matrix(f"{p}.ffn_up", PLM_FF, D)
        m.matrix(f"{p}.ffn_down", D, PLM_FF)
    return m, plm_logits(Evaluation(m), tokens)


def plm_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    x, n = e.w["token_embd"][tokens], len(tokens)
    angles = ref.plain_angles(ROT, 10000.0, places(tokens))
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        q = (h @ w["attn_q"].T).reshape(n, HEADS, NOPE + ROT)
        latents, shared = np.split(h @ w["attn_kv_a_mqa"].T, [RANK], axis=1)
        both = (ref.rms_norm(latents, w["attn_kv_a_norm"], e.eps) @ w["attn_kv_b"].T).reshape(n, HEADS, NOPE + VALUE)
        turned = ref.rotate(shared[:, None], angles, neox=False).repeat(HEADS, axis=1)
        q = np.concatenate([q[..., :NOPE], ref.rotate(q[..., NOPE:], angles, neox=False)], axis=-1)
        k = np.concatenate([both[..., :NOPE], turned], axis=-1)
        x = x + e.output(il, ref.attend(q, k, both[..., NOPE:], 1 / math.sqrt(NOPE + ROT)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + relu(h @ w["ffn_up"].T) ** 2 @ w["ffn_down"].T
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


MODELS = [dbrx, arctic, smallthinker, smallthinker_without_windows, openelm]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.08)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_latent_modes(mla: int, tmp_path: Path) -> None:
    model, truth = plm(LONG)
    checks.check_latent_mode(model, truth, mla, tmp_path, 5e-5)


def test_refused(tmp_path: Path) -> None:
    for make, key, value, error, message in (
        (dbrx, "expert_count", 0, FileFormatError, "expert_count is 0"),
        (arctic, "expert_count", 0, FileFormatError, "expert_count is 0"),
        (smallthinker, "expert_count", 0, FileFormatError, "expert_count is 0"),
        (smallthinker, "expert_gating_func", 9, FileFormatError, "unknown expert_gating_func 9"),
        (plm, "expert_count", 4, (FileFormatError, UnsupportedError), "expert"),
    ):
        path = make()[0].write(tmp_path / "model.gguf")
        arch = make()[0].arch
        overrides = {f"{arch}.{key}": value}
        if key == "expert_count" and not value:
            overrides[f"{arch}.expert_used_count"] = 0
        with pytest.raises(error, match=message):
            Model.load(path, ModelParams(kv_overrides=overrides))


def test_size_classes() -> None:
    for arch, layers, expected in (
        ("dbrx", 40, "16x12B"),
        ("arctic", 35, "10B+128x3.66B"),
        ("openelm", 16, "270M"),
        ("plm", 32, "1.8B"),
        ("smallthinker", 52, "20B"),
    ):
        assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
