"""Random models of dots3 note (dots3note) and their evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_sparse as sparse
from tests.cpu.models.reference_models import Evaluation, RandomModel

KEY_NORM_EPS = 1e-6
"""Of the LayerNorm of index keys: the files do not say it."""
SCALE, BASE, WINDOW_BASE = 1.5, 10000.0, 500.0


@dataclass(frozen=True)
class Kind:
    """Heads and elements of one kind of layers."""

    heads: int
    nope: int
    rot: int
    value: int
    rank: int


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model. windows: layers that attend to the last `window` tokens; the others have indexers."""

    layers: int = 4
    windows: tuple[int, ...] = (1, 3)
    full: Kind = Kind(heads=4, nope=32, rot=16, value=32, rank=48)
    local: Kind = Kind(heads=2, nope=40, rot=24, value=32, rank=72)
    window: int = 7
    d: int = 64
    q_rank: int = 40
    ff: int = 96
    dense: int = 1
    experts: int = 8
    used: int = 3
    ff_expert: int = 32
    index_heads: int = 16
    index_size: int = 32
    top_k: int = 12

    def of(self, il: int) -> Kind:
        """The kind of a layer."""
        return self.local if il in self.windows else self.full


def random_model(n: Sizes, seed: int = 71) -> RandomModel:
    """A model as llama.cpp writes its files."""
    is_local = [il in n.windows for il in range(n.layers)]
    keys = {
        **checks.shape(n.layers, n.d, n.full.heads, 1, n.full.rank + n.full.rot, n.ff),
        **checks.RMS,
        "attention.head_count": [n.of(il).heads for il in range(n.layers)],
        "attention.head_count_kv": 1,
        "attention.value_length": n.full.rank,
        "attention.key_length_swa": n.local.rank + n.local.rot,
        "attention.value_length_swa": n.local.rank,
        "attention.key_length_mla": n.full.nope + n.full.rot,
        "attention.value_length_mla": n.full.value,
        "attention.key_length_mla_swa": n.local.nope + n.local.rot,
        "attention.value_length_mla_swa": n.local.value,
        "attention.q_lora_rank": n.q_rank,
        "attention.kv_lora_rank": n.full.rank,
        "attention.kv_lora_rank_swa": n.local.rank,
        "attention.sliding_window": n.window,
        "attention.sliding_window_pattern": is_local,
        "attention.indexer.head_count": n.index_heads,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": n.top_k,
        "attention.indexer.types": [not x for x in is_local],
        "rope.dimension_count": n.full.rot,
        "rope.dimension_count_swa": n.local.rot,
        "rope.freq_base": BASE,
        "rope.freq_base_swa": WINDOW_BASE,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff_expert,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": n.dense,
    }
    m = RandomModel("dots3note", seed, **keys)
    checks.frame(m, n.d, tied=False)
    for il in range(n.layers):
        p, kind = f"blk.{il}", n.of(il)
        for name, size in (("attn_norm", n.d), ("ffn_norm", n.d), ("attn_q_a_norm", n.q_rank)):
            m.norm(f"{p}.{name}", size)
        m.norm(f"{p}.attn_kv_a_norm", kind.rank)
        m.norm(f"{p}.attn_k_norm", kind.rot)
        m.matrix(f"{p}.attn_q_a", n.q_rank, n.d)
        m.matrix(f"{p}.attn_q_b", kind.heads * (kind.nope + kind.rot), n.q_rank)
        m.matrix(f"{p}.attn_kv_a_mqa", kind.rank + kind.rot, n.d)
        m.matrix(f"{p}.attn_k_b", kind.heads, kind.rank, kind.nope)
        m.weights[f"{p}.attn_k_b"] *= math.sqrt(kind.nope / kind.rank)  # keys of unit variance
        m.matrix(f"{p}.attn_v_b", kind.heads, kind.value, kind.rank)
        m.matrix(f"{p}.attn_output", n.d, kind.heads * kind.value)
        m.matrix(f"{p}.attn_gate", kind.heads, n.d)
        if il not in n.windows:
            m.matrix(f"{p}.indexer.attn_q_b", n.index_heads * n.index_size, n.q_rank)
            m.matrix(f"{p}.indexer.attn_k", n.index_size, n.d)
            m.norm(f"{p}.indexer.k_norm", n.index_size)
            m.vector(f"{p}.indexer.k_norm.bias", n.index_size)
            m.matrix(f"{p}.indexer.proj", n.index_heads, n.d)
        if il < n.dense:
            m.ffn(p, n.d, n.ff)
        else:
            checks.experts(m, p, n.d, n.ff_expert, n.experts)
            m.vector(f"{p}.exp_probs_b.bias", n.experts)
            m.ffn(p, n.d, n.ff_expert, "_shexp")
    return m


class Dots3Note(Evaluation):
    """The definition; one text from position 0 on. all_cells: indexers choose nothing."""

    def __init__(self, model: RandomModel, n: Sizes, *, all_cells: bool = False) -> None:
        super().__init__(model)
        self.n, self.all_cells = n, all_cells

    def choose(self, w: ref.Weights, h: np.ndarray, latent: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """bool [T, T]: the positions (columns) that a token (row) sees."""
        n = self.n
        q = (latent @ w["indexer.attn_q_b"].T).reshape(len(h), n.index_heads, n.index_size)
        k = ref.layer_norm(h @ w["indexer.attn_k"].T, w["indexer.k_norm"], KEY_NORM_EPS) + w["indexer.k_norm.bias"]
        q, k = ref.rotate(q, angles, neox=True), ref.rotate(k[:, None], angles, neox=True)[:, 0]
        scores = sparse.index_scores(q, h @ w["indexer.proj"].T, k)
        return sparse.choose(scores, np.tri(len(h), dtype=bool), n.top_k)

    def attention(self, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Branch for a normed input h [T, D]."""
        n, kind = self.n, self.n.of(il)
        base = WINDOW_BASE if il in n.windows else BASE
        angles = ref.plain_angles(kind.rot, base, np.arange(len(h), dtype=np.float64))
        q_latent = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], self.eps)
        q = (q_latent @ w["attn_q_b"].T).reshape(len(h), kind.heads, -1)
        latent, rotated = np.split(h @ w["attn_kv_a_mqa"].T, [kind.rank], axis=1)
        latent = ref.rms_norm(latent, w["attn_kv_a_norm"], self.eps)
        rotated = ref.rotate(ref.rms_norm(rotated, w["attn_k_norm"], self.eps)[:, None], angles, neox=False)
        q = np.concatenate([q[..., : kind.nope], ref.rotate(q[..., kind.nope :], angles, neox=False)], axis=2)
        k = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
        k = np.concatenate([k, np.repeat(rotated, kind.heads, axis=1)], axis=2)
        v = np.einsum("tr,hvr->thv", latent, w["attn_v_b"])
        if il in n.windows:
            out = ref.attend(q, k, v, q.shape[2] ** -0.5, visible=lambda i, j: i - j < n.window)
        elif self.all_cells:
            out = ref.attend(q, k, v, q.shape[2] ** -0.5)
        else:
            chosen = self.choose(w, h, q_latent, angles)
            out = ref.attend(q, k, v, q.shape[2] ** -0.5, visible=lambda i, j: chosen[i, j])
        gate = ref.sigmoid(h @ w["attn_gate"].T)
        return (out.reshape(len(h), kind.heads, -1) * gate[..., None]).reshape(len(h), -1) @ w["attn_output"].T

    def experts(self, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Routed experts and the shared one."""
        return self.ffn(il, h, suffix="_shexp") + checks.sigmoid_routed(w, h, self.n.used, SCALE)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a text."""
        x = self.w["token_embd"][tokens]
        for il in range(self.n.layers):
            w = checks.layer_weights(self, il)
            x = x + self.attention(il, w, ref.rms_norm(x, w["attn_norm"], self.eps))
            h = ref.rms_norm(x, w["ffn_norm"], self.eps)
            x = x + (self.ffn(il, h) if il < self.n.dense else self.experts(il, w, h))
        return ref.rms_norm(x, self.w["output_norm"], self.eps) @ self.w["output"].T
