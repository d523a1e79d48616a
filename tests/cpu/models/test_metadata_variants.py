"""What metadata and optional tensors say of experts and biases, against float64 evaluations of the definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

N_TOKENS = 21
IDS = np.arange(N_TOKENS) * 7 % N_VOCAB
D, HEADS, HEAD, FF, N_EXPERT, N_USED = 64, 4, 16, 24, 6, 2
GATES = {
    1: lambda z: ref.softmax(z[None])[0],
    2: ref.sigmoid,
    3: lambda z: z,
    4: lambda z: np.sqrt(np.log1p(np.exp(z))),
}


def keys(**more: Any) -> dict[str, Any]:
    """Metadata of two layers."""
    return {
        "block_count": 2,
        "embedding_length": D,
        "attention.head_count": HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "feed_forward_length": FF,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def frame(m: RandomModel, *, tied: bool = False) -> RandomModel:
    """Embedding, norms, output and attention."""
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("output_norm", D)
    if not tied:
        m.matrix("output", N_VOCAB, D)
    for il in range(2):
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"blk.{il}.{name}", D)
        m.attention(f"blk.{il}", D, HEADS, HEADS, HEAD)
    return m


def attended(e: Evaluation, il: int, x: np.ndarray, *, neox: bool, norms: bool) -> np.ndarray:
    """x and its attention."""
    q, k, v = e.qkv(il, ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps))
    if norms:
        q, k = (ref.rms_norm(t, e.w[f"blk.{il}.attn_{n}_norm"], e.eps) for t, n in ((q, "q"), (k, "k")))
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(N_TOKENS))
    q, k = (ref.rotate(t, angles, neox=neox) for t in (q, k))
    return x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))


def check(m: RandomModel, wanted: np.ndarray, path: Path) -> None:
    """Logits of a prompt with exact caches, with and without flash attention."""
    model = Model.load(m.write(path / "model.gguf"))
    for flash in (True, False):
        params = ContextParams(n_ctx=64, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32")
        got = Context(model, params).decode(Batch.single(IDS, logits="all"))
        off = np.abs(got - wanted).max(axis=1) / np.abs(wanted).max()
        assert off.max() < 5e-5, f"flash {flash}: position {off.argmax()} off by {off.max():.1e}"


@pytest.mark.parametrize("arch", ["llama", "ernie4_5"])
def test_biases_of_all_projections(arch: str, tmp_path: Path) -> None:
    m = frame(RandomModel(arch, 3, **keys()), tied=arch == "ernie4_5")
    for il in range(2):
        m.ffn(f"blk.{il}", D, FF)
        for name, n in (("attn_q", D), ("attn_k", D), ("attn_v", D), ("attn_output", D)):
            m.vector(f"blk.{il}.{name}.bias", n)
        for name, n in (("ffn_gate", FF), ("ffn_up", FF), ("ffn_down", D)):
            m.vector(f"blk.{il}.{name}.bias", n)
    e = Evaluation(m)
    w, x = e.w, e.w["token_embd"][IDS]
    for il in range(2):
        x = attended(e, il, x, neox=False, norms=False)
        h = ref.rms_norm(x, w[f"blk.{il}.ffn_norm"], e.eps)
        gate, up = (h @ w[f"blk.{il}.ffn_{n}"].T + w[f"blk.{il}.ffn_{n}.bias"] for n in ("gate", "up"))
        x = x + (ref.silu(gate) * up) @ w[f"blk.{il}.ffn_down"].T + w[f"blk.{il}.ffn_down.bias"]
    check(m, ref.rms_norm(x, w["output_norm"], e.eps) @ w.get("output", w["token_embd"]).T, tmp_path)


def test_layers_of_different_widths(tmp_path: Path) -> None:
    """Heads, KV heads and feed-forward width as one number per layer; a list of another length is refused."""
    heads, kv, widths = [4, 6], [2, 1], [FF, FF + 17]
    m = RandomModel("llama", 4, **keys(attention__head_count_kv=kv) | {
        "attention.head_count": heads, "feed_forward_length": widths,
    })  # fmt: skip
    m.matrix("token_embd", N_VOCAB, D)
    m.matrix("output", N_VOCAB, D)
    m.norm("output_norm", D)
    for il in range(2):
        m.norm(f"blk.{il}.attn_norm", D)
        m.norm(f"blk.{il}.ffn_norm", D)
        m.attention(f"blk.{il}", D, heads[il], kv[il], HEAD)
        m.ffn(f"blk.{il}", D, widths[il])
    e = Evaluation(m)
    x = e.w["token_embd"][IDS]
    for il in range(2):
        x = attended(e, il, x, neox=False, norms=False)
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    check(m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T, tmp_path)
    m.keys["feed_forward_length"] = [FF] * 3
    with pytest.raises(FileFormatError, match="feed_forward_length has wrong array length; expected 2, got 3"):
        Model.load(m.write(tmp_path / "wrong.gguf"))


@pytest.mark.parametrize("gating", [None, 1, 2, 3, 4])
@pytest.mark.parametrize(
    ("norm", "scale", "bias", "fused", "n_shared", "n_dense"),
    [
        (None, 1.0, False, False, 0, 0),
        (True, 2.5, True, True, 2, 1),
        (None, 2.5, True, True, 1, 0),
        (True, 1.0, False, False, 1, 0),
    ],
)
def test_routing_of_the_metadata(
    gating: int | None,
    norm: bool | None,
    scale: float,
    bias: bool,
    fused: bool,
    n_shared: int,
    n_dense: int,
    tmp_path: Path,
) -> None:
    """Gating functions (softmax if there is no key), norm, scale, selection bias, fused gate and up, shared experts."""
    optional = {"expert_gating_func": gating, "expert_weights_norm": norm}
    m = frame(RandomModel("dots1", 5, **keys(
        expert_count=N_EXPERT, expert_used_count=N_USED, expert_feed_forward_length=FF, expert_shared_count=n_shared,
        expert_weights_scale=scale, leading_dense_block_count=n_dense,
        **{name: value for name, value in optional.items() if value is not None},
    )))  # fmt: skip
    for il in range(2):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_q_norm", HEAD)
        m.norm(f"{p}.attn_k_norm", HEAD)
        if il < n_dense:
            m.ffn(p, D, FF)
            continue
        m.matrix(f"{p}.ffn_gate_inp", N_EXPERT, D)
        if bias:
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
        for name, rows in {"gate_up": 2 * FF}.items() if fused else {"gate": FF, "up": FF}.items():
            m.matrix(f"{p}.ffn_{name}_exps", N_EXPERT, rows, D)
        m.matrix(f"{p}.ffn_down_exps", N_EXPERT, D, FF)
        if n_shared:
            m.ffn(p, D, FF * n_shared, "_shexp")
    e = Evaluation(m)
    x = e.w["token_embd"][IDS]
    for il in range(2):
        x = attended(e, il, x, neox=True, norms=True)
        h = ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps)
        if il < n_dense:
            x = x + e.ffn(il, h)
            continue
        x = x + routed(e, f"blk.{il}", h, gating or 1, norm or False, scale)
        x = x + e.ffn(il, h, suffix="_shexp") if n_shared else x
    check(m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T, tmp_path)


def routed(e: Evaluation, p: str, h: np.ndarray, gating: int, norm: bool, scale: float) -> np.ndarray:
    """Weighted sum of the chosen experts of every token."""
    w, out = e.w, np.zeros_like(h)
    for t, row in enumerate(h):
        scores = GATES[gating](w[f"{p}.ffn_gate_inp"] @ row)
        chosen = np.argsort(-(scores + w.get(f"{p}.exp_probs_b.bias", 0.0)))[:N_USED]
        weights = GATES[1](scores[chosen]) if gating == 3 else scores[chosen]
        weights = scale * (weights / weights.sum() if norm else weights)
        for c, weight in zip(chosen, weights, strict=True):
            fused = w.get(f"{p}.ffn_gate_up_exps")
            gate, up = (
                np.split(fused[c], 2) if fused is not None else (w[f"{p}.ffn_{n}_exps"][c] for n in ("gate", "up"))
            )
            out[t] += weight * (w[f"{p}.ffn_down_exps"][c] @ (ref.silu(gate @ row) * (up @ row)))
    return out
