"""Random models of MiniMax M3 (minimax-m3) and their evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import Evaluation, RandomModel

SCALE, BASE, ALPHA, LIMIT = 2.0, 10000.0, 1.702, 7.0


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model. sparse: layers with an indexer; block: positions that are chosen together, top_k of which
    a token and KV head sees, the `local` last ones among them.
    """

    layers: int = 3
    sparse: tuple[int, ...] = (1, 2)
    d: int = 64
    heads: int = 4
    kv: int = 2
    head: int = 32
    rot: int = 16
    ff: int = 96
    dense: int = 1
    experts: int = 8
    used: int = 3
    ff_expert: int = 32
    index_size: int = 32
    top_k: int = 3
    block: int = 4
    local: int = 1


def random_model(n: Sizes, seed: int = 91) -> RandomModel:
    """A model as llama.cpp writes its files; gates and ups reach their bounds."""
    keys = {
        **checks.shape(n.layers, n.d, n.heads, n.kv, n.head, n.ff),
        **checks.RMS,
        "rope.dimension_count": n.rot,
        "rope.freq_base": BASE,
        "attention.indexer.head_count": n.kv,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": n.top_k,
        "attention.indexer.block_size": n.block,
        "attention.indexer.local_blocks": n.local,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff_expert,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": n.dense,
    }
    m = RandomModel("minimax-m3", seed, **keys)
    checks.frame(m, n.d, tied=False)
    for il in range(n.layers):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", n.d)
        m.norm(f"{p}.ffn_norm", n.d)
        m.attention(p, n.d, n.heads, n.kv, n.head)
        m.norm(f"{p}.attn_q_norm", n.head)
        m.norm(f"{p}.attn_k_norm", n.head)
        if il in n.sparse:
            m.matrix(f"{p}.indexer.q_proj", n.kv * n.index_size, n.d)
            m.matrix(f"{p}.indexer.k_proj", n.index_size, n.d)
            m.norm(f"{p}.indexer.q_norm", n.index_size)
            m.norm(f"{p}.indexer.k_norm", n.index_size)
        if il < n.dense:
            m.ffn(p, n.d, n.ff)
        else:
            checks.experts(m, p, n.d, n.ff_expert, n.experts)
            m.vector(f"{p}.exp_probs_b.bias", n.experts)
            m.ffn(p, n.d, n.ff_expert, "_shexp")
        for name in (name for name in m.weights if name.startswith(f"{p}.ffn_gate") and "inp" not in name):
            m.weights[name] *= 4
    return m


class MiniMaxM3(Evaluation):
    """The definition; one text from position 0 on. all_cells: indexers choose nothing."""

    def __init__(self, model: RandomModel, n: Sizes, *, all_cells: bool = False) -> None:
        super().__init__(model)
        self.n, self.all_cells = n, all_cells

    def choose(self, w: ref.Weights, h: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """bool [KV, T, T]: the positions (columns) that the query heads of a KV head see for a token (row)."""
        n, at = self.n, np.arange(len(h))
        q = (h @ w["indexer.q_proj"].T).reshape(len(h), n.kv, n.index_size)
        k = (h @ w["indexer.k_proj"].T)[:, None]
        q = ref.rotate(ref.rms_norm(q, w["indexer.q_norm"], self.eps), angles, neox=True)
        k = ref.rotate(ref.rms_norm(k, w["indexer.k_norm"], self.eps), angles, neox=True)[:, 0]
        scores = np.einsum("thd,sd->hts", q, k)
        chosen = np.zeros(scores.shape, bool)
        for head, t in np.ndindex(scores.shape[:2]):
            own = t // n.block
            best = np.array(
                [scores[head, t, b * n.block : min((b + 1) * n.block, t + 1)].max() for b in range(own + 1)]
            )
            best[max(0, own - n.local + 1) :] = np.inf
            kept = np.argsort(-best, kind="stable")[: n.top_k]
            chosen[head, t] = np.isin(at // n.block, kept)
        return chosen

    def attention(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Branch for a normed input h [T, D]."""
        n = self.n
        angles = ref.plain_angles(n.rot, BASE, np.arange(len(h), dtype=np.float64))
        q, k, v = ((h @ w[f"attn_{x}"].T).reshape(len(h), -1, n.head) for x in "qkv")
        q = ref.rotate(ref.rms_norm(q, w["attn_q_norm"], self.eps), angles, neox=True)
        k = ref.rotate(ref.rms_norm(k, w["attn_k_norm"], self.eps), angles, neox=True)
        chosen = None if "indexer.q_proj" not in w or self.all_cells else self.choose(w, h, angles)
        group, parts = n.heads // n.kv, []
        for head in range(n.kv):
            visible = None if chosen is None else (lambda i, j, own=chosen[head]: own[i, j])
            own = slice(head * group, (head + 1) * group), slice(head, head + 1)
            parts.append(ref.attend(q[:, own[0]], k[:, own[1]], v[:, own[1]], 1 / math.sqrt(n.head), visible=visible))
        return np.concatenate(parts, axis=1) @ w["attn_output"].T

    def network(self, w: ref.Weights, h: np.ndarray, suffix: str = "") -> np.ndarray:
        """Dense or shared network."""
        gate, up, down = (w[f"ffn_{name}{suffix}"] for name in ("gate", "up", "down"))
        return ref.swiglu_oai(h @ gate.T, h @ up.T) @ down.T

    def experts(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Routed experts and the shared one."""
        shares = checks.chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), self.n.used, w["exp_probs_b.bias"])
        shares *= SCALE / shares.sum(-1, keepdims=True)
        out = self.network(w, h, "_shexp")
        for t, row in enumerate(h):
            for e in np.flatnonzero(shares[t]):
                hidden = ref.swiglu_oai(w["ffn_gate_exps"][e] @ row, w["ffn_up_exps"][e] @ row)
                out[t] += shares[t, e] * (w["ffn_down_exps"][e] @ hidden)
        return out

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a text."""
        x = self.w["token_embd"][tokens]
        for il in range(self.n.layers):
            w = checks.layer_weights(self, il)
            x = x + self.attention(w, ref.rms_norm(x, w["attn_norm"], self.eps))
            h = ref.rms_norm(x, w["ffn_norm"], self.eps)
            x = x + (self.network(w, h) if il < self.n.dense else self.experts(w, h))
        return ref.rms_norm(x, self.w["output_norm"], self.eps) @ self.w["output"].T
