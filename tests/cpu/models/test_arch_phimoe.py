"""Phi-3.5-MoE: a random model against its definition."""

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
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

N, HEADS, KV, HEAD, F, EXPERTS, USED = 3, 4, 2, 32, 48, 6, 2
D = HEADS * HEAD
ORIGINAL = 100
"""Tokens beyond which the long factors are taken."""
JITTER = 0.01


def mixed(scores: np.ndarray) -> np.ndarray:
    """Weights [T, E]: of the best expert its share among those near it, of the next one the same without the first."""
    weights = np.zeros_like(scores)
    for t, row in enumerate(scores):
        left = row.copy()
        for _ in range(USED):
            best = int(np.nanargmax(left))
            far = (row[best] - left) / np.maximum(np.abs(left), row[best]) > 2 * JITTER
            near = left[~far & ~np.isnan(left)]
            weights[t, best] = 1 / np.exp(near - row[best]).sum()
            left[best] = np.nan
    return weights


def phimoe_model(*, close: bool = True) -> RandomModel:
    """close: the logits of experts are near each other, so that more than one counts."""
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED}
    keys |= {"rope.scaling.original_context_length": ORIGINAL, "rope.scaling.attn_factor": 1.19}
    m = RandomModel("phimoe", 201, **checks.shape(N, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=False)
    m.vector("output_norm.bias", D)
    m.vector("output.bias", N_VOCAB)
    m.norm("rope_factors_short", HEAD // 2)
    m.norm("rope_factors_long", HEAD // 2)
    for il in range(N):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", D)
            m.vector(f"{p}.{name}.bias", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name, n in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD), ("output", D)):
            m.vector(f"{p}.attn_{name}.bias", n)
        checks.experts(m, p, D, F, EXPERTS)
        if close:  # a common part of all logits makes their distances small beside them
            m.weights[f"{p}.ffn_gate_inp"] = 0.02 * m.weights[f"{p}.ffn_gate_inp"] + m.weights[f"{p}.ffn_gate_inp"][:1]
    return m


def phimoe_logits(m: RandomModel, kind: str = "short") -> np.ndarray:
    """Logits of TOKENS by the factors of a kind."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(len(TOKENS), dtype=float), e.w[f"rope_factors_{kind}"])

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return ref.layer_norm(x, e.w[name], e.eps) + e.w[f"{name}.bias"]

    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, normed(x, f"blk.{il}.attn_norm"))
        q, k = (ref.rotate(y, angles, neox=True, magnitude=1.19) for y in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        h = normed(x, f"blk.{il}.ffn_norm")
        x = x + checks.routed(w, h, mixed(h @ w["ffn_gate_inp"].T), USED)
    return normed(x, "output_norm") @ e.w["output"].T + e.w["output.bias"]


def phimoe() -> tuple[RandomModel, np.ndarray]:
    m = phimoe_model()
    return m, phimoe_logits(m, "long")


@pytest.mark.parametrize("close", [True, False])
def test_definition(close: bool, tmp_path: Path) -> None:
    """Contexts of 256 for two sequences are beyond the original one."""
    m = phimoe_model(close=close)
    path = checks.check_definition(m, phimoe_logits(m, "long"), tmp_path)
    checks.check_shift(path)


def test_short_contexts(tmp_path: Path) -> None:
    m = phimoe_model()
    m.keys["rope.scaling.original_context_length"] = 256
    path = m.write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    checks.hold("short", context.decode(Batch.single(TOKENS, logits="all")), phimoe_logits(m), 5e-5)


def test_refused(tmp_path: Path) -> None:
    path = phimoe_model().write(tmp_path / "model.gguf")
    overrides = {"phimoe.expert_count": 0, "phimoe.expert_used_count": 0}
    with pytest.raises(FileFormatError, match="expert_count is 0"):
        Model.load(path, ModelParams(kv_overrides=overrides))
    m = phimoe_model()
    del m.weights["blk.1.ffn_norm.bias"]
    with pytest.raises(FileFormatError, match=r"tensor 'blk\.1\.ffn_norm\.bias' not found"):
        Model.load(m.write(tmp_path / "lacking.gguf"))


def test_size_class() -> None:
    assert size_class({"general.architecture": "phimoe", "phimoe.block_count": 32}) == "16x3.8B"
